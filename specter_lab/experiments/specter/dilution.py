"""A lookahead that is wrong on purpose, and how right the real one is: precision and recall of what the draft announces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from specter_lab.measure.windows import Windows
from specter_lab.plan.policy import Clock, Loads, Policy, Prefetcher
from specter_lab.plan.residency import ABSENT, Slots
from specter_lab.plan.serve import Ahead, Needs


class DilutedPrefetch(Prefetcher):
    """Another prefetcher's plans, with a share of the experts exchanged for absent ones that the round does not need.

    Who runs it for real cannot say what a round will need (`foresee`): then any absent expert may be put in. An exchanged expert stays exchanged for the round: its later plans are dropped. Where every absent expert of the layer
    is needed, nothing is copied in its place.
    """

    def __init__(self, inner: Prefetcher, precision: float, seed: int) -> None:
        self._inner, self._precision = inner, precision
        self._rng = np.random.default_rng(seed)
        self._needs: Needs | None = None

    def foresee(self, needs: Needs) -> None:
        """To be wrong for certain, one has to know what is right."""
        self._inner.foresee(needs)
        self._needs = needs

    def begin(self, slots: Slots, depth: int, clock: Clock) -> Loads:
        self._slots = slots
        self._right = np.zeros(slots.slot_of.shape, np.bool_)  # [L, E] planned, and left as it was
        self._wrong = np.zeros(slots.slot_of.shape, np.bool_)  # [L, E] planned, and exchanged
        self._needed = np.zeros(slots.slot_of.shape, np.bool_)
        if depth and self._needs is not None:
            first, experts = self._needs.first, self._needs.experts
            self._needed[np.repeat(np.arange(len(first) - 1), np.diff(first)), experts] = True
        return self._exchange(self._inner.begin(slots, depth, clock))

    def drafted(self, step: int, experts: np.ndarray, weights: np.ndarray, clock: Clock) -> Loads:
        return self._exchange(self._inner.drafted(step, experts, weights, clock))

    def finish(self, clock: Clock) -> Loads:
        return self._exchange(self._inner.finish(clock))

    def rest(self, clock: Clock) -> Loads:
        return self._exchange(self._inner.rest(clock))

    def ahead(self, needs: Needs) -> Ahead:
        wanted = self._inner.ahead(needs)
        kept = [(known, self._one(*pair)) for known, *pair in zip(*wanted)]
        rows = np.array([(known, *pair) for known, pair in kept if pair is not None], np.int64).reshape(-1, 3)
        return Ahead(*map(np.ascontiguousarray, rows.T))

    def observe_step(self, ms: float) -> None:
        self._inner.observe_step(ms)

    def observe_copy(self, copied_bytes: float, ms: float) -> None:
        self._inner.observe_copy(copied_bytes, ms)

    def _exchange(self, loads: Loads) -> Loads:
        pairs = [pair for pair in map(self._one, *loads) if pair is not None]
        layers, experts = np.array(pairs, np.int64).reshape(-1, 2).T
        return np.ascontiguousarray(layers), np.ascontiguousarray(experts)

    def _one(self, layer: int, expert: int) -> tuple[int, int] | None:
        slots = self._slots
        if not self._wrong[layer, expert] and (self._right[layer, expert] or self._rng.random() < self._precision):
            self._right[layer, expert] = True
            return layer, expert
        slots.pinned[layer, expert] = False
        if self._wrong[layer, expert]:
            return None
        self._wrong[layer, expert] = True
        others = np.flatnonzero((slots.slot_of[layer] == ABSENT) & ~self._needed[layer] & ~slots.pinned[layer])
        if not len(others):
            return None
        instead = int(self._rng.choice(others))
        slots.pinned[layer, instead] = True
        return layer, instead


def diluted(policy: Policy, precision: float, seed: int) -> Policy:
    """`policy` with a share 1 - `precision` of the experts it plans exchanged; of those that plan layer by layer
    (`Prefetcher.verifying`) only the plans before the verification."""
    return replace(policy, prefetch=lambda scene: DilutedPrefetch(policy.prefetch(scene), precision, seed))


def positions(windows: Windows, request: int, depth: int, new_tokens: int) -> Iterator[int]:
    """Where the rounds of a request begin."""
    position = 0
    while position < new_tokens:
        yield position
        position += min(int(windows.accepted[request, position]), depth) + 1


def perfect(windows: Windows) -> Windows:
    """The same text with a draft that routes as the target does for the same tokens: everything planned is needed."""
    return replace(
        windows,
        draft=windows.target[:, :, : windows.depth],
        draft_weights=windows.target_weights[:, :, : windows.depth],
    )


@dataclass(frozen=True)
class Announced:
    """Per request, summed over its rounds and layers: distinct experts; arrays [R]."""

    announced: np.ndarray  # used by some drafted token
    needed: np.ndarray  # used by the verification's K + 1 tokens
    needed_by_drafted: np.ndarray  # used by its first K tokens, those the draft has seen
    both: np.ndarray  # announced and needed
    both_by_drafted: np.ndarray  # announced and needed by the first K


def announced(windows: Windows, depth: int, new_tokens: int) -> Announced:
    """How much of what verification needs the draft's routing names, over the rounds that decoding takes."""
    sums = np.array([_of_request(windows, request, depth, new_tokens) for request in range(windows.requests)])
    return Announced(*sums.T)


def _of_request(windows: Windows, request: int, depth: int, new_tokens: int) -> list[int]:
    starts = list(positions(windows, request, depth, new_tokens))
    draft = _used(windows.draft[request, starts, :depth], windows.num_experts)
    target = _used(windows.target[request, starts, : depth + 1], windows.num_experts)
    drafted = _used(windows.target[request, starts, :depth], windows.num_experts)
    return [int(found.sum()) for found in (draft, target, drafted, draft & target, draft & drafted)]


def _used(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """Experts [N, T, L, k] -> [N, L, E], used by some token."""
    used = np.zeros((len(experts), experts.shape[2], num_experts), np.bool_)
    n, layer = np.indices(used.shape[:2])
    for token in range(experts.shape[1]):
        for place in range(experts.shape[3]):
            used[n, layer, experts[:, token, :, place]] = True
    return used
