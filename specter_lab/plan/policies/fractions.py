"""Prefetching at fixed shares of the draft: the simpler schedules that Specter is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specter_lab.plan.lookahead import Lookahead, plan_top
from specter_lab.plan.policy import NO_LOADS, Clock, Loads, Prefetcher, Scene
from specter_lab.plan.residency import Slots


class PrefetchAt(Prefetcher):
    """One top-M plan at each of `shares` of the drafted tokens."""

    def __init__(self, scene: Scene, shares: Sequence[float]) -> None:
        self._scene, self._shares = scene, shares

    def begin(self, slots: Slots, depth: int, clock: Clock) -> Loads:
        self._slots = slots
        self._lookahead = Lookahead(self._scene.layers, self._scene.num_experts)
        self._at = {max(1, int(share * depth)) for share in self._shares}
        return NO_LOADS

    def drafted(self, step: int, experts: np.ndarray, weights: np.ndarray, clock: Clock) -> Loads:
        for of_request in experts:
            self._lookahead.observe(of_request)
        return plan_top(self._lookahead.counts, self._slots) if step in self._at else NO_LOADS
