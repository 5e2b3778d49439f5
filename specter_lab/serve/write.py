"""From token ids to text, round by round: end tokens, stop strings, whole characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import torch

from specter_lab.errors import UserError
from specter_lab.serve.model import Served
from specter_lab.serve.stops import StopText
from specter_lab.serve.text import TokenText

SEEDED_DEPTH = 4  # sampling repeats only at a fixed depth: this one where the depth would be chosen from measured times
MAX_TEMPERATURE = 2.0
MIN_TEMPERATURE = 0.01  # below, the most likely token is taken
SEEDS = range(-(2**63), 2**63)


@dataclass(frozen=True)
class Ask:
    """One text that is asked for."""

    ids: tuple[int, ...]  # the prompt's tokens
    max_tokens: int  # new ones
    temperature: float = 0.0
    seed: int | None = None  # None: another text every time
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A piece of text; the last one says why it ended."""

    text: str
    tokens: int  # new ones so far
    finish: Literal["stop", "length"] | None = None


def check_ask(served: Served, ask: Ask) -> None:
    """Raise UserError for what cannot be written: one sentence each."""
    if len(ask.ids) < 2:
        raise UserError("the prompt has fewer than 2 tokens: give a longer one")
    vocab = served.engine.weights.shape.vocab
    if bad := [token for token in ask.ids if not 0 <= token < vocab]:
        raise UserError(f"token {bad[0]} is not in the vocabulary: give ids from 0 to {vocab - 1}")
    if len(ask.ids) + ask.max_tokens > served.context_tokens:
        raise UserError(f"{len(ask.ids)} tokens of prompt and {ask.max_tokens} new ones are more than the {served.context_tokens} "
                        f"that fit: shorten the prompt or ask for fewer")  # fmt: skip
    check_sampling(ask)


def check_sampling(ask: Ask) -> None:
    """The part of `check_ask` that needs no model."""
    if not 0 <= ask.temperature <= MAX_TEMPERATURE:
        raise UserError(f"a temperature of {ask.temperature:g} is not used here: give 0 to {MAX_TEMPERATURE:g}")
    if ask.seed is not None and ask.seed not in SEEDS:
        raise UserError(f"a seed of {ask.seed} is not used here: give a whole number of 64 bits")
    if "" in ask.stops:
        raise UserError("an empty stop text would end everything: give at least one character")


class Writer:
    """One request's text, from the tokens that rounds commit. Special tokens are not shown, nor a character whose last bytes
    never came."""

    def __init__(self, served: Served, ask: Ask) -> None:
        self._ends, self._decoder, self._stop = served.ends, TokenText(served.tokenizer, ask.ids), StopText(ask.stops)
        self._count = 0

    def add(self, tokens: Sequence[int]) -> Piece:
        """What these tokens show; with a reason, nothing may follow."""
        text = ""
        for token in tokens:
            self._count += 1
            if token in self._ends:
                return Piece(text + self._stop.rest(), self._count, "stop")
            text += self._stop.feed(self._decoder.feed(token))
            if self._stop.found:
                return Piece(text, self._count, "stop")
        return Piece(text, self._count)

    def end(self) -> Piece:
        """There are no more tokens."""
        return Piece(self._stop.rest(), self._count, "length")


def write(served: Served, ask: Ask) -> Iterator[Piece]:
    """Pieces of one text as rounds commit them, the last with its reason; closing the iterator ends the work after its round.

    One thread, from the first piece to the last.
    """
    how, writer = sampling(served, ask), Writer(served, ask)
    rounds = served.engine.generate(torch.tensor(ask.ids), ask.max_tokens, stream=True, ignore_eos=True, **how)
    with closing(rounds):
        for tokens in rounds:
            yield (piece := writer.add(tokens))
            if piece.finish:
                return
    yield writer.end()


def sampling(served: Served, ask: Ask) -> dict:
    """Temperature, depth and seed of an ask, as the engine takes them."""
    warmth = temperature_of(ask)
    online = served.depth is None and served.engine.depth is None
    depth = SEEDED_DEPTH if online and ask.seed is not None and warmth > 0 else served.depth
    return {"temperature": warmth, "depth": depth, "seed": torch.seed() % 2**63 if ask.seed is None else ask.seed}


def temperature_of(ask: Ask) -> float:
    """As the engine takes it."""
    return ask.temperature if ask.temperature >= MIN_TEMPERATURE else 0.0
