"""Prompts of your own: text files with one prompt per line, JSON lines with a field `text`, or the sets by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from specter_lab.errors import UserError
from specter_lab.measure.hub_prompts import HUB_SETS, fetch_prompts
from specter_lab.measure.prompts import PROMPT_SETS, Request, select


def gather(sources: Sequence[str], requests: int, seed: int = 0) -> list[Request]:
    """The prompts of several sources, one after the other.

    Args:
        sources: files (`.txt` or `.jsonl`), shipped prompt sets ("mathematics", ...) or hub data sets ("gsm8k", ...).
        requests: how many of each: a seeded choice of a shipped set, the first of a hub set or a file. A file with
            fewer gives all it has.
        seed: of that choice.

    Raises:
        UserError: no source, one that is nothing of the kind, an empty file, or a line that is not a prompt.
    """
    if not sources:
        raise UserError(f"no prompts: give a .txt or .jsonl file, or one of {', '.join(PROMPT_SETS)}")
    if requests < 1:
        raise UserError(f"{requests} requests of every source leave nothing to measure: ask for 1 or more")
    return [request for source in sources for request in _from(source, requests, seed)]


def _from(source: str, requests: int, seed: int) -> list[Request]:
    if source in PROMPT_SETS:
        return select(requests, sets=[source], seed=seed)
    if source in HUB_SETS:
        return fetch_prompts(source, requests)
    return read_file(Path(source))[:requests]


def read_file(path: Path) -> list[Request]:
    """Every prompt of a file; ids are file name and line number.

    Raises:
        UserError: no such file, not UTF-8 text, another format than .txt or .jsonl, no prompts, or a line of a .jsonl
            file without text.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"'{path}' is neither a prompt set ({', '.join((*PROMPT_SETS, *HUB_SETS))}) nor a prompt file: "
                        f"give a .txt file with one prompt per line, or .jsonl with a field 'text'")  # fmt: skip
    if not path.is_file():
        raise UserError(f"no prompt file {path}: check the path")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}): save it in that encoding") from error
    text_of = _text_of_json if path.suffix == ".jsonl" else _text_of_line
    texts = {f"{path.name}:{n}": text_of(line, path, n) for n, line in enumerate(lines, 1) if line.strip()}
    if not texts:
        raise UserError(f"{path} holds no prompts: write one per line")
    return [Request(name, path.stem, path.name, "unknown", text) for name, text in texts.items()]


def _text_of_line(line: str, _path: Path, _number: int) -> str:
    return line.strip()


def _text_of_json(line: str, path: Path, number: int) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{number} is not JSON ({error.msg}): every line must be an object with a field "
                        f"'text'") from error  # fmt: skip
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{path}:{number} has no text in 'text': every line must be an object with a field 'text'")
    return text
