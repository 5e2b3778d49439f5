"""Specter in paper mode: top-M plans at chunk boundaries, one barrier, per-layer LRU (Specter, section PIO).

Final Cleanup is taken as a phase of its own, as it is named: a last plan when the draft has ended, which a barrier then waits
for. It could also be the plan of the boundary at which every layer has its M predictions (`specter_early.py`), but
with few slots that is the first boundary: nothing would be planned after it, and Specter would be SP-E. The paper's hit rates
set the two apart (16 GB: 99.85 % and 96.04 %), and put Specter above SP-L, which plans at the end.
"""

from __future__ import annotations

import numpy as np

from specter_lab.plan.lookahead import Boundaries, Lookahead, plan_top
from specter_lab.plan.policy import NO_LOADS, Clock, Loads, Policy, Prefetcher, Scene
from specter_lab.plan.residency import Slots


class ChunkedPrefetch(Prefetcher):
    """Cold Start -> Prefetch Overlap -> Final Cleanup.

    Args:
        last_plan: also plan when the draft has ended, if the last boundary's plan already had M predictions per layer.
    """

    def __init__(self, scene: Scene, last_plan: bool = True) -> None:
        self._scene, self._last_plan = scene, last_plan
        self._boundaries = Boundaries()

    def begin(self, slots: Slots, depth: int, clock: Clock) -> Loads:
        self._slots, self._depth = slots, depth
        self._lookahead = Lookahead(self._scene.layers, self._scene.num_experts)
        self._next = self._boundaries.first(depth)
        self._full = False  # every layer has M predictions: no more boundaries
        return NO_LOADS

    def drafted(self, step: int, experts: np.ndarray, weights: np.ndarray, clock: Clock) -> Loads:
        for of_request in experts:
            self._lookahead.observe(of_request)
        if self._full or step < self._next or step == self._depth:
            return NO_LOADS
        loads = plan_top(self._lookahead.counts, self._slots)
        self._next = self._boundaries.after(step, len(loads[0]) * self._scene.costs.link_bytes)
        self._full = self._lookahead.full(self._slots.count)
        return loads

    def finish(self, clock: Clock) -> Loads:
        if self._depth == 0 or (self._full and not self._last_plan):
            return NO_LOADS
        return plan_top(self._lookahead.counts, self._slots)

    def observe_step(self, ms: float) -> None:
        self._boundaries.observe_step(ms)

    def observe_copy(self, copied_bytes: float, ms: float) -> None:
        self._boundaries.observe_copy(copied_bytes, ms)


POLICY = Policy("specter", "Specter, paper mode", "Specter, section PIO", prefetch=ChunkedPrefetch, barrier=True)
