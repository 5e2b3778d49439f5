"""Belady, same slots: the expert whose next use lies farthest ahead goes first; demand loading, no speculation.

Looks at `scene.future`. What Belady's order gives a system that works like the others, not a bound: a missing expert has to
take a slot while it computes, and of a pass that needs more than the slots the last ones stay, so other orders can be better
here. The hit rate that no demand policy exceeds is `plan.bounds.best_hit_rates`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specter_lab.errors import UserError
from specter_lab.plan.bounds import next_uses, passes_of
from specter_lab.plan.policy import Policy, Scene, Scores
from specter_lab.plan.residency import SCORED
from specter_lab.plan.serve import Needs


class NextUse(Scores):
    """Minus the passes until the next use."""

    def __init__(self, scene: Scene) -> None:
        if scene.future is None:
            raise UserError("policy 'belady' has to know the future: give the scene the requests to come")
        self._future, self._now = scene.future, 0

    def foresee(self, requests: Sequence[int], new_tokens: int, batch: int) -> None:
        passes = passes_of(self._future, requests, new_tokens, batch, depth=0)
        self._scores = -next_uses(passes.used).astype(np.float64)  # [P, L, E]

    def update(self, requests: Sequence[int], needs: Needs) -> np.ndarray | None:
        self._now += 1
        return self._scores[self._now - 1]


POLICY = Policy("belady", "Belady, same slots", "knows the future", draft=None, order=SCORED, scores=NextUse)
