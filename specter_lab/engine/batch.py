"""Continuous batching: requests come and go lane by lane, and every round drafts, prefetches and verifies for all of them.

    while anybody waits or writes:
        free lanes take the requests that wait         # prompts of neighbours are read side by side
        propose, one lookahead merged over the lanes   # as deep as the deepest lane wants
        verify; every lane accepts for itself          # and rolls back by itself: its position is a number

A layer's missing experts cross the link once for all lanes: that is what a batch saves where the link limits (Specter, section 6).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Generator, Tensor

from specter_lab.engine.decode import Meter, begin, play_round
from specter_lab.engine.experts import ExpertMemory
from specter_lab.engine.session import NO_REQUEST, Session
from specter_lab.plan.depth_control import DepthController
from specter_lab.plan.policy import Prefetcher

MOST_UNEQUAL = 2  # times as long as the shortest beside it a prompt may be


@dataclass(frozen=True, eq=False)
class Request:
    """One text to be written."""

    ids: Tensor  # [P] prompt, P at least 2
    new_tokens: int
    depth: DepthController  # of this request alone
    temperature: float = 0.0
    generator: Generator | None = None  # of sampling, on the device
    ends: frozenset[int] = frozenset()  # tokens that end it
    wanted: Callable[[], bool] = lambda: True  # asked before every round; else its lane is free


Take = Callable[[], Request | None]  # the next request, or None; once all lanes are free, None ends the batch


class Piece(NamedTuple):
    """What a round added to one request."""

    request: Request
    tokens: list[int]
    is_last: bool


@dataclass
class _Lane:
    """A request that is being written."""

    request: Request
    left: int
    drafting: int = 0  # its depth in this round

    def cut(self, committed: Sequence[int]) -> tuple[list[int], bool]:
        """As many of them as it may still write, and whether that was all."""
        tokens = list(committed[: self.left])
        end = next((place for place, token in enumerate(tokens) if token in self.request.ends), None)
        if end is not None:
            tokens = tokens[: end + 1]
        self.left -= len(tokens)
        return tokens, end is not None or self.left == 0


def in_order(requests: Iterable[Request]) -> Take:
    """All of them, one after the other."""
    waiting = deque(requests)
    return lambda: waiting.popleft() if waiting else None


def decode_batch(
    session: Session, memory: ExpertMemory, prefetcher: Prefetcher, take: Take, meter: Meter
) -> Iterator[Piece]:
    """Write what `take` gives, at most `session.lanes` at a time; whoever reads the pieces may change who is wanted."""
    lanes: list[_Lane | None] = [None] * session.lanes
    while True:
        lanes = [lane if lane and lane.request.wanted() else None for lane in lanes]
        _join(session, memory, prefetcher, lanes, take)
        if not any(lanes):
            break
        for lane in filter(None, lanes):
            lane.drafting = min(lane.request.depth.next_depth(), session.depth)
        depths = [NO_REQUEST if lane is None else lane.drafting for lane in lanes]
        session.set_depths(depths)
        session.prepare(max(depths))
        generators = [lane and lane.request.generator for lane in lanes]
        played = play_round(session, memory, prefetcher, max(depths), depths, generators, meter)
        for place, (accepted, committed) in enumerate(played.committed):
            if (lane := lanes[place]) is None:
                continue
            lane.request.depth.observe(lane.drafting, accepted, played.seconds * 1e3)
            tokens, is_last = lane.cut(committed)
            if is_last:
                lanes[place] = None
            yield Piece(lane.request, tokens, is_last)
    meter.counters |= memory.counters


def _join(
    session: Session, memory: ExpertMemory, prefetcher: Prefetcher, lanes: list[_Lane | None], take: Take
) -> None:
    """Free lanes take requests that wait; their prompts are read."""
    joined = []
    for place, lane in enumerate(lanes):
        if lane is not None:
            continue
        request = take()
        if request is None:
            break
        if isinstance(session.temperature, Tensor):
            session.temperature[place] = request.temperature
        lanes[place] = _Lane(request, request.new_tokens)
        joined.append(place)
    for places in _side_by_side(joined, [len(lanes[place].request.ids) for place in joined]):
        begin(session, memory, prefetcher, [lanes[place].request.ids for place in places], places[0])


def _side_by_side(places: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Places that are neighbours, their prompts about equally long, for a short one waits for the longest beside it."""
    runs: list[list[int]] = []
    shortest = longest = 0  # prompt of the last run
    for place, length in zip(places, lengths):
        if runs and place == runs[-1][-1] + 1 and max(longest, length) <= MOST_UNEQUAL * min(shortest, length):
            runs[-1].append(place)
            shortest, longest = min(shortest, length), max(longest, length)
        else:
            runs.append([place])
            shortest = longest = length
    return runs
