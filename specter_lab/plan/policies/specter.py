"""Specter in paper mode: top-M plans at chunk boundaries, one barrier, per-layer LRU (Specter, section PIO)."""

from __future__ import annotations

import numpy as np

from specter_lab.plan.lookahead import Boundaries, Lookahead, plan_top
from specter_lab.plan.policy import NO_LOADS, Clock, Loads, Policy, Prefetcher, Scene
from specter_lab.plan.residency import Slots


class ChunkedPrefetch(Prefetcher):
    """Cold Start -> Prefetch Overlap -> Final Cleanup."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._boundaries = Boundaries()

    def begin(self, slots: Slots, depth: int, clock: Clock) -> Loads:
        self._slots, self._depth = slots, depth
        self._lookahead = Lookahead(self._scene.layers, self._scene.num_experts)
        self._next = self._boundaries.first(depth)
        self._done = depth == 0
        return NO_LOADS

    def drafted(self, step: int, experts: np.ndarray, weights: np.ndarray, clock: Clock) -> Loads:
        for of_request in experts:
            self._lookahead.observe(of_request)
        if self._done or step < self._next or step == self._depth:
            return NO_LOADS
        loads = plan_top(self._lookahead.counts, self._slots)
        self._next = self._boundaries.after(step, len(loads[0]) * self._scene.costs.expert_bytes)
        self._done = self._lookahead.full(self._slots.count)
        return loads

    def finish(self, clock: Clock) -> Loads:
        return NO_LOADS if self._done else plan_top(self._lookahead.counts, self._slots)

    def observe_step(self, ms: float) -> None:
        self._boundaries.observe_step(ms)

    def observe_copy(self, copied_bytes: float, ms: float) -> None:
        self._boundaries.observe_copy(copied_bytes, ms)


POLICY = Policy("specter", "Specter, paper mode", "Specter, section PIO", prefetch=ChunkedPrefetch, barrier=True)
