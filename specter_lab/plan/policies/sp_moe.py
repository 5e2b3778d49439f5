"""SP-MoE: the draft's routing is prefetched while it writes, for layers up to a cutoff only.

The cutoff is the number of layers whose copies fit into the draft's time: depth x draft step / (copies per layer x copy time).
Copies per layer are those of an average window of `scene.history` that equal slots would lack, at most the slots; layers
beyond the cutoff load on demand. Simplified: SP-MoE drafts with a small dense model and predicts by the target's routers
on its attention outputs; here the INT4 draft's own routing predicts. Its batched copies are single ones.
"""

from __future__ import annotations

import numpy as np

from specter_lab.plan.policies.specter_fast import RollingPrefetch
from specter_lab.plan.policy import NO_LOADS, Clock, Loads, Policy, Scene
from specter_lab.plan.residency import Slots
from specter_lab.plan.serve import NOTHING_AHEAD, Ahead, Needs

NO_CONFIDENCE = 0.0  # every expert of a drafted token is wanted


def cutoff_layer(scene: Scene) -> int:
    """MoE layers that are prefetched: 0 .. all."""
    draft_ms = scene.depth * scene.costs.draft_step_ms
    per_layer_ms = copies_per_layer(scene) * scene.costs.pace_ms
    return min(scene.layers, int(draft_ms / per_layer_ms)) if per_layer_ms else scene.layers


def copies_per_layer(scene: Scene) -> float:
    """Experts of a window that are missing when the slots hold any others; without history, of a window of uniform routing."""
    experts, slots = scene.num_experts, min(scene.slots_per_layer, scene.num_experts)
    if scene.history is None:
        distinct = experts * (1 - (1 - scene.costs.model.top_k / experts) ** scene.depth)
    else:
        drafted = scene.history.windows.draft[:, :, : scene.depth]  # [R, N, K, L, k]
        flat = drafted.transpose(0, 1, 3, 2, 4).reshape(-1, drafted.shape[2] * drafted.shape[4])
        used = np.zeros((len(flat), experts), bool)
        np.put_along_axis(used, flat.astype(np.int64), True, axis=1)
        distinct = float(used.sum(axis=1).mean())
    return min(distinct * (1 - slots / experts), slots)


class UpToCutoff(RollingPrefetch):
    """Rolling prefetch of the first layers, while the draft writes."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene, NO_CONFIDENCE)
        self._cutoff = cutoff_layer(scene)

    def begin(self, slots: Slots, depth: int, clock: Clock) -> Loads:
        super().begin(slots, depth, clock)
        self._room = slots.count[: self._cutoff].copy()
        return NO_LOADS

    def ahead(self, needs: Needs) -> Ahead:
        return NOTHING_AHEAD


POLICY = Policy("sp-moe", "SP-MoE, cutoff layer", "SP-MoE", prefetch=UpToCutoff)
