"""Documents and the small text operations the corpus is built with."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SHINGLE_CHARS = 80
PROBE_CHARS = SHINGLE_CHARS // 2
ASCII_PUNCTUATION = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": " - ",
        "\u2026": "...",
        "\u00a0": " ",
        "\ufeff": "",
    }
)


@dataclass(frozen=True)
class Document:
    """One piece of text; `unit` is what a split must never cut in two."""

    domain: str
    source: str
    unit: str
    text: str


def normalise(text: str) -> str:
    """Return NFC text with plain quotes, Unix line ends and no trailing blanks."""
    text = unicodedata.normalize("NFC", text).translate(ASCII_PUNCTUATION)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def unwrap(text: str) -> str:
    """Join the hard-wrapped lines of each paragraph of prose."""
    return "\n\n".join(" ".join(block.split()) for block in re.split(r"\n\s*\n", text))


def chunks(text: str, max_chars: int = 4000) -> Iterator[str]:
    """Cut text at blank lines (else at line ends) into pieces of about max_chars."""
    piece: list[str] = []
    piece_chars = 0
    for block in text.split("\n\n"):
        parts = [block] if len(block) <= max_chars else _lines_up_to(block, max_chars)
        for part in parts:
            if piece and piece_chars + len(part) > max_chars:
                yield "\n\n".join(piece)
                piece, piece_chars = [], 0
            piece.append(part)
            piece_chars += len(part) + 2
    if piece:
        yield "\n\n".join(piece)


def _lines_up_to(block: str, max_chars: int) -> list[str]:
    parts = [""]
    for line in block.splitlines(keepends=True):
        if parts[-1] and len(parts[-1]) + len(line) > max_chars:
            parts.append("")
        parts[-1] += line
    return [part.rstrip("\n") for part in parts]


def order_key(seed: int, unit: str) -> str:
    """A stable pseudo-random sort key: the same seed gives the same order anywhere."""
    return hashlib.sha256(f"{seed}:{unit}".encode()).hexdigest()


def flat(text: str) -> str:
    """Case-folded text with single blanks, the form in which overlap is judged."""
    return " ".join(text.casefold().split())


@dataclass(frozen=True)
class ShingleIndex:
    """Every 80-character window of a set of texts, and every half window to probe with."""

    full: set[int]
    half: set[int]

    def add(self, text: str) -> None:
        """Add all windows of one text."""
        line = flat(text)
        self.full.update(hash(line[i : i + SHINGLE_CHARS]) for i in range(len(line) - SHINGLE_CHARS + 1))
        self.half.update(hash(line[i : i + PROBE_CHARS]) for i in range(len(line) - PROBE_CHARS + 1))

    def overlaps(self, text: str) -> bool:
        """True if the text shares a run of 80 characters with an indexed text.

        A shared run of 80 covers at least one whole 40-character cell of the text,
        so cells are looked up first and all windows only when one of them is known.
        """
        line = flat(text)
        cells = range(0, len(line) - PROBE_CHARS + 1, PROBE_CHARS)
        if not any(hash(line[i : i + PROBE_CHARS]) in self.half for i in cells):
            return False
        windows = range(len(line) - SHINGLE_CHARS + 1)
        return any(hash(line[i : i + SHINGLE_CHARS]) in self.full for i in windows)


def shingle_index(texts: Iterable[str] = ()) -> ShingleIndex:
    """Index the given texts."""
    index = ShingleIndex(set(), set())
    for text in texts:
        index.add(text)
    return index
