"""Fiddler: popular experts stay on the GPU, the others are computed by the host's cores while few tokens use them.

An expert is copied only when the CPU would take longer than one copy, which takes many tokens. Popularity is that of
`scene.history`. Simplified: a copied expert takes the slot of the least popular one (Fiddler's leaves again at once), and the
transfer of activations is free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specter_lab.plan.policy import NO_LOADS, Clock, Loads, Policy, Prefetcher, Scene, Scores, slots_without_draft
from specter_lab.plan.residency import SCORED, Slots
from specter_lab.plan.serve import CPU_IF_SHORTER, Needs


def popularity(scene: Scene) -> np.ndarray:
    """Uses per expert: [L, E]; without history all equal."""
    uses = np.zeros((scene.layers, scene.num_experts))
    if scene.history is not None:
        experts = scene.history.decoding()  # [R, N, L, k]
        np.add.at(uses, (np.arange(scene.layers)[:, None], experts), 1)
    return uses


class Popular(Scores):
    """The least popular goes first."""

    def __init__(self, scene: Scene) -> None:
        self._scores: np.ndarray | None = popularity(scene)

    def update(self, requests: Sequence[int], needs: Needs) -> np.ndarray | None:
        first, self._scores = self._scores, None
        return first


class Placement(Prefetcher):
    """Copies the most popular experts once, before anything else."""

    def __init__(self, scene: Scene) -> None:
        self._order = np.argsort(-popularity(scene), axis=1, kind="stable")  # [L, E]
        self._placed = False

    def begin(self, slots: Slots, depth: int, clock: Clock) -> Loads:
        if self._placed:
            return NO_LOADS
        self._placed = True
        layers = np.repeat(np.arange(len(slots.count)), slots.count)
        experts = np.concatenate([order[:count] for order, count in zip(self._order, slots.count)])
        return layers, experts


POLICY = Policy(
    "fiddler", "Fiddler, CPU for few tokens", "Fiddler", draft=None, slots=slots_without_draft, order=SCORED,
    scores=Popular, prefetch=Placement, miss=CPU_IF_SHORTER,
)  # fmt: skip
