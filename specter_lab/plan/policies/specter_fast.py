"""Fast mode: a plan after every drafted token, in layer order, without a barrier (DESIGN.md section 3).

Wanted experts wait here and are handed out only as fast as the link drains them, so that a miss of an early layer never
waits behind prefetches for a late one; what is left when drafting ends is fetched while earlier layers verify.
An expert whose routing weight is below `CONFIDENCE` of its token's even share is left to the miss path: it is the one
on which draft and target disagree most.
"""

from __future__ import annotations

import numpy as np

from specter_lab.compiled import compiled
from specter_lab.plan.policy import Clock, Loads, Policy, Prefetcher, Scene
from specter_lab.plan.residency import ABSENT, Slots
from specter_lab.plan.serve import AHEAD_COPIES, Ahead, Needs

CONFIDENCE = 0.25  # of 1 / k
UNSEEN = np.iinfo(np.int64).max


class RollingPrefetch(Prefetcher):
    """Every expert that some drafted token uses, in the order of drafting, as long as its layer has slots."""

    def __init__(self, scene: Scene, confidence: float = CONFIDENCE) -> None:
        self._scene, self._confidence = scene, confidence
        self._step_ms = scene.costs.draft_step_ms
        self._wanted_at = np.full((scene.layers, scene.num_experts), UNSEEN)  # a prompt is read before the first round

    def begin(self, slots: Slots, depth: int, clock: Clock) -> Loads:
        self._slots = slots
        self._wanted_at = np.full(slots.slot_of.shape, UNSEEN)  # [L, E] step at which an absent expert was asked for
        self._room = slots.count.copy()  # [L] slots not yet promised to this round
        return self._loads(clock, 0.0)

    def drafted(self, step: int, experts: np.ndarray, weights: np.ndarray, clock: Clock) -> Loads:
        want(self._slots, self._wanted_at, self._room, step, experts, weights, self._confidence)
        return self._loads(clock, self._step_ms)

    def observe_step(self, ms: float) -> None:
        self._step_ms = ms

    def rest(self, clock: Clock) -> Loads:
        return hand_out(self._wanted_at, self._wanted_at.size)

    def ahead(self, needs: Needs) -> Ahead:
        layers, experts = hand_out(self._wanted_at, self._wanted_at.size)
        return Ahead(np.full(len(layers), -1), layers, experts)

    def _loads(self, clock: Clock, until_next_ms: float) -> Loads:
        """As many as the link can begin before it is asked again."""
        behind_ms = max(0.0, clock.link_free_ms - clock.now_ms)
        count = max(0, int((until_next_ms - behind_ms) / clock.copy_ms + AHEAD_COPIES))
        return hand_out(self._wanted_at, count)


@compiled
def want(
    slots: Slots, wanted_at: np.ndarray, room: np.ndarray, step: int, experts: np.ndarray, weights: np.ndarray, confidence: float
) -> None:  # fmt: skip
    """Pin the experts [B, L, k] of a drafted token, and note the absent ones as wanted since `step`.

    Layers beyond those of `room` are left out.
    """
    batch, _, top_k = experts.shape
    for request in range(batch):
        for layer in range(len(room)):
            even_share = weights[request, layer].sum() / top_k
            for place in range(top_k):
                expert = experts[request, layer, place]
                sure = weights[request, layer, place] >= confidence * even_share
                if sure and not slots.pinned[layer, expert] and room[layer] > 0:
                    slots.pinned[layer, expert] = True
                    room[layer] -= 1
                    if slots.slot_of[layer, expert] == ABSENT:
                        wanted_at[layer, expert] = step


@compiled
def hand_out(wanted_at: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `count` wanted experts, layer by layer, oldest first; they are wanted no more."""
    layers, experts, found, layer = np.empty(count, np.int64), np.empty(count, np.int64), 0, 0
    while found < count and layer < len(wanted_at):
        expert = wanted_at[layer].argmin()
        if wanted_at[layer, expert] == UNSEEN:
            layer += 1
            continue
        wanted_at[layer, expert] = UNSEEN
        layers[found], experts[found] = layer, expert
        found += 1
    return layers[:found], experts[:found]


POLICY = Policy("specter-fast", "Specter, fast mode", "this project: rolling prefetch", prefetch=RollingPrefetch)
