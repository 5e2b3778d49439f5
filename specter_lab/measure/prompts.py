"""Requests: the five prompt sets that ship with the project, how to pick from them, and their tokens.

The sets lie in data/prompts/<set>.jsonl, one request per line: id, source, licence, text and, where the source has
one, the reference answer. Prompt sets of the papers that do not ship are in `hub_prompts`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specter_lab.errors import UserError
from specter_lab.paths import PROMPTS

PROMPT_SETS = ("mathematics", "prose", "code", "instructions", "dialogue")
REQUIRED_FIELDS = ("id", "source", "licence", "text")


@dataclass(frozen=True)
class Request:
    """One prompt."""

    id: str
    prompt_set: str
    source: str
    licence: str
    text: str
    reference: str | None = None


@dataclass(frozen=True)
class TokenizedRequests:
    """Requests and their token ids; requests keep their own lengths."""

    requests: tuple[Request, ...]
    ids: tuple[Tensor, ...]  # per request [S], int64

    def __post_init__(self) -> None:
        if len(self.requests) != len(self.ids):
            raise ValueError(f"{len(self.requests)} requests but {len(self.ids)} token lists")

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.ids)

    def at_least(self, num_tokens: int) -> TokenizedRequests:
        """Only the requests that have `num_tokens` tokens or more (a fixed prefix needs that many)."""
        kept = [i for i, ids in enumerate(self.ids) if len(ids) >= num_tokens]
        return TokenizedRequests(tuple(self.requests[i] for i in kept), tuple(self.ids[i] for i in kept))


def load_prompts(name: str, folder: Path = PROMPTS) -> list[Request]:
    """All requests of one prompt set, in file order.

    Raises:
        UserError: no set by that name, no file, an empty file, or a line that is not a request.
    """
    if name not in PROMPT_SETS:
        raise UserError(f"no prompt set '{name}': choose from {', '.join(PROMPT_SETS)}")
    path = folder / f"{name}.jsonl"
    if not path.exists():
        raise UserError(f"{path} is missing: restore it with `git checkout -- data/prompts`")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text: restore it with `git checkout -- data/prompts`") from error
    requests = [_parse(line, name, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise UserError(f"{path} holds no prompts: restore it with `git checkout -- data/prompts`")
    if len({request.id for request in requests}) != len(requests):
        raise UserError(f"{path} uses an id twice: give every prompt an id of its own")
    return requests


def _parse(line: str, prompt_set: str, where: str) -> Request:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error.msg}): every line must be one JSON object") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object: a prompt needs {', '.join(REQUIRED_FIELDS)}")
    for field in REQUIRED_FIELDS:
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise UserError(f"{where} has no text in '{field}': a prompt needs {', '.join(REQUIRED_FIELDS)}")
    return Request(row["id"], prompt_set, row["source"], row["licence"], row["text"], row.get("reference"))


def select(
    requests_per_set: int, sets: Sequence[str] = PROMPT_SETS, seed: int = 0, folder: Path = PROMPTS
) -> list[Request]:
    """The same number of requests from every set, in the order of `sets`.

    The choice within a set depends on `seed` alone, and a smaller selection is part of every larger one.

    Raises:
        UserError: a set has fewer requests than asked for, or cannot be read.
    """
    chosen: list[Request] = []
    for name in sets:
        requests = load_prompts(name, folder)
        if not 1 <= requests_per_set <= len(requests):
            raise UserError(f"cannot take {requests_per_set} requests from '{name}': ask for 1 to {len(requests)}")
        random.Random(f"{seed}/{name}").shuffle(requests)
        chosen += requests[:requests_per_set]
    return chosen


def tokenize(
    requests: Sequence[Request], tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None
) -> TokenizedRequests:
    """Token ids of every request, special tokens as the tokenizer adds them, cut to the first `max_tokens`.

    Raises:
        UserError: there are no requests, one has no tokens, or all would be cut to none.
    """
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"prompts cut to {max_tokens} tokens leave nothing to read: keep 1 or more of each, or all")
    if not requests:
        raise UserError("no requests to tokenize: select at least one prompt")
    encoded = tokenizer([request.text for request in requests], verbose=False)["input_ids"]
    for request, ids in zip(requests, encoded):
        if not ids:
            raise UserError(f"prompt '{request.id}' has no tokens: its text must not be empty")
    return TokenizedRequests(tuple(requests), tuple(torch.tensor(ids[:max_tokens]) for ids in encoded))
