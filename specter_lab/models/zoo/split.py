"""Who gets which unit: prompts, calibration, held-out text or training."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain, zip_longest

from specter_lab.models.zoo.text import Document, ShingleIndex, flat, order_key

PROMPT_UNITS = {"template": 12, "codeio": 40, "background": 170, "conversation": 290}
TRAINING_ONLY = {("homeassistant", "module"), ("factbook", "fields")}  # their boilerplate recurs in every file
CALIBRATION_BYTES = {"conversation": 75_000}  # per kind of unit of one source
HELDOUT_BYTES = {"conversation": 280_000}
CALIBRATION_DEFAULT_BYTES = 45_000
HELDOUT_DEFAULT_BYTES = 140_000
UNIT_COUNTS_BYTES = 24_000  # of a long unit, only that much goes into an evaluation part


def kind_of(unit: str) -> str:
    """The kind of unit: what stands before the first hyphen."""
    return unit.partition("-")[0]


def prompt_units(units: Iterable[str], kind: str, seed: int) -> list[str]:
    """The units of a kind that are set aside for prompts, in their stable order."""
    mine = sorted({unit for unit in units if kind_of(unit) == kind}, key=lambda unit: order_key(seed, unit))
    return mine[: PROMPT_UNITS[kind]]


def roles(documents: list[Document], seed: int) -> dict[tuple[str, str], str]:
    """Map (source, unit) to prompts, calibration, heldout or train."""
    size_bytes: dict[tuple[str, str], int] = defaultdict(int)
    for document in documents:
        size_bytes[document.source, document.unit] += len(document.text.encode())
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for source, unit in size_bytes:
        groups[source, kind_of(unit)].append(unit)
    found = {}
    for (source, kind), units in groups.items():
        ordered = sorted(units, key=lambda unit: order_key(seed, unit))
        first = PROMPT_UNITS.get(kind, 0)
        left_bytes = {
            "calibration": CALIBRATION_BYTES.get(kind, CALIBRATION_DEFAULT_BYTES),
            "heldout": HELDOUT_BYTES.get(kind, HELDOUT_DEFAULT_BYTES),
        }
        for position, unit in enumerate(ordered):
            role = "prompts" if position < first else next((r for r, left in left_bytes.items() if left > 0), "train")
            if (source, kind) in TRAINING_ONLY:
                role = "train"
            if role in left_bytes:
                left_bytes[role] -= min(size_bytes[source, unit], UNIT_COUNTS_BYTES)
            found[source, unit] = role
    return found


def evaluation_part(documents: list[Document], limit_bytes: int, index: ShingleIndex, seed: int) -> list[Document]:
    """Pick up to limit_bytes per domain, sources in turn, nothing that overlaps the index; then index it."""
    picked: list[Document] = []
    for domain in sorted({document.domain for document in documents}):
        by_source: dict[str, list[Document]] = defaultdict(list)
        unit_bytes: dict[tuple[str, str], int] = defaultdict(int)
        ordered = sorted(enumerate(documents), key=lambda item: order_key(seed, f"{item[1].unit}:{item[0]}"))
        for _, document in ordered:
            key = (document.source, document.unit)
            if document.domain == domain and unit_bytes[key] < UNIT_COUNTS_BYTES and not index.overlaps(document.text):
                unit_bytes[key] += len(document.text.encode())
                by_source[document.source].append(document)
        left_bytes = limit_bytes
        for document in filter(None, chain.from_iterable(zip_longest(*by_source.values()))):
            if left_bytes <= 0:
                break
            left_bytes -= len(document.text.encode())
            picked.append(document)
    for document in picked:
        index.add(document.text)
    return picked


def training_part(documents: Iterable[Document], index: ShingleIndex) -> tuple[list[Document], dict[str, int], int]:
    """Return (kept documents, number dropped for overlap per source, number of duplicates)."""
    seen: set[str] = set()
    dropped: dict[str, int] = defaultdict(int)
    kept, duplicates = [], 0
    for document in documents:
        key = flat(document.text)
        if key in seen:
            duplicates += 1
        elif index.overlaps(document.text):
            dropped[document.source] += 1
        else:
            seen.add(key)
            kept.append(document)
    return kept, dict(sorted(dropped.items())), duplicates
