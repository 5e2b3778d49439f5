"""What an offloading system decides, as data and small functions; simulator and engine ask the same ones.

    draft      what writes the window: "int4" (the target with INT4 experts), "fewer" (the target with fewer of its own experts,
               read from the same slots), None
    depth      drafted tokens per round; None: the setting's K*
    slots      how the expert slots are divided over the layers
    order      who is evicted
    prefetch   what is copied before it is needed
    miss       what happens to an expert that is not there: LOAD it, compute it on the CPU, ... (`plan.serve`)
    barrier    verification waits for every copy on its way (paper mode), or for each expert when it needs it

A policy is one file in `plan/policies/` that defines `POLICY`, and one line in its registry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specter_lab.compress.int4 import int4_expert_bytes
from specter_lab.models.geometry import BF16_BYTES
from specter_lab.plan.residency import LRU, Slots
from specter_lab.plan.serve import LOAD, NOTHING_AHEAD, Ahead, Needs
from specter_lab.plan.step_costs import StepCosts
from specter_lab.plan.workload import Workload

Loads = tuple[np.ndarray, np.ndarray]  # MoE layers [n] and experts [n], in the order of copying
NO_LOADS: Loads = (np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class Scene:
    """What a policy may know before it runs."""

    costs: StepCosts
    slots_per_layer: int  # the budget: this many expert slots in every MoE layer, or as many in all
    depth: int  # K*
    history: Workload | None = None  # other requests, to learn from
    future: Workload | None = None  # the requests to come: for policies that say they know the future

    @property
    def layers(self) -> int:
        return self.costs.model.moe_layers

    @property
    def num_experts(self) -> int:
        return self.costs.model.num_experts

    @property
    def pool_slots(self) -> int:
        """Expert slots per layer that fit in the memory of the draft's INT4 experts."""
        model = self.costs.model
        return model.num_experts * int4_expert_bytes(model.hidden_size, model.expert_width) // model.expert_bytes


@dataclass(frozen=True)
class Clock:
    """Where the streams stand when a prefetcher is asked, in ms."""

    now_ms: float
    link_free_ms: float  # when the copies asked for so far will have ended
    copy_ms: float  # one expert; from disk, where that is slower than the link


class Prefetcher:
    """Nothing is copied ahead. Every answer is the absent experts to copy now; those planned are pinned in `slots`."""

    def begin(self, slots: Slots, depth: int, clock: Clock) -> Loads:
        """A round of `depth` drafted tokens begins."""
        return NO_LOADS

    def drafted(self, step: int, experts: np.ndarray, weights: np.ndarray, clock: Clock) -> Loads:
        """Draft step `step` (1..K) used these experts with these routing weights: [B, L, k]."""
        return NO_LOADS

    def finish(self, clock: Clock) -> Loads:
        """All K tokens are drafted."""
        return NO_LOADS

    def rest(self, clock: Clock) -> Loads:
        """A pass begins during which nobody will ask: what would have been copied ahead meanwhile (see `ahead`)."""
        return NO_LOADS

    def verifying(self, layer: int, token_experts: np.ndarray, clock: Clock) -> Loads:
        """A target pass is at `layer`, whose tokens use these experts [T, k]; its own misses are already asked for."""
        return NO_LOADS

    def ahead(self, needs: Needs) -> Ahead:
        """The same for a whole pass at once, which simulates ten times as fast: what to copy when which layer is known.

        `needs` is the pass that begins. A row with `known` l may depend on the layers up to l of it, and on no later one.
        """
        return NOTHING_AHEAD

    def foresee(self, needs: Needs) -> None:
        """What the round that begins will need at its end; only a policy that says it knows the future may listen."""

    def observe_step(self, ms: float) -> None:
        """A draft step took `ms`."""

    def observe_copy(self, copied_bytes: float, ms: float) -> None:
        """The copies of one answer took `ms`."""


class Scores:
    """A victim order of its own: experts with small scores go first."""

    def update(self, requests: Sequence[int], needs: Needs) -> np.ndarray | None:
        """Before a target pass of these requests: scores [L, E], or None to leave them.

        `needs` of this pass may only be looked at by a policy that says it knows the future; by others once the next begins.
        """
        return None

    def foresee(self, requests: Sequence[int], new_tokens: int, batch: int) -> None:
        """All that will be decoded, in order, before the first pass; only a policy that says it knows the future may listen."""


def equal_slots(scene: Scene) -> np.ndarray:
    """The same number for every layer: [L]."""
    return np.full(scene.layers, min(scene.slots_per_layer, scene.num_experts))


def slots_without_draft(scene: Scene) -> np.ndarray:
    """Equal, with the memory of the draft's INT4 experts turned into slots (about 16 a layer for DeepSeek): [L]."""
    return np.full(scene.layers, min(scene.slots_per_layer + scene.pool_slots, scene.num_experts))


def separate_slots(scene: Scene) -> np.ndarray:
    """Equal, after a draft that shares nothing has taken its own copy of all other weights: [L].

    At least one where there is one to begin with, for the paper runs such a draft at its low budgets too.
    """
    model = scene.costs.model
    own_bytes = (model.shared_experts + model.other_parameters) * BF16_BYTES
    taken = math.ceil(own_bytes / (model.moe_layers * model.expert_bytes))
    equal = min(scene.slots_per_layer, scene.num_experts)
    return np.full(scene.layers, max(min(1, equal), equal - taken))


def no_prefetch(scene: Scene) -> Prefetcher:
    return Prefetcher()


@dataclass(frozen=True)
class Policy:
    """One offloading system."""

    id: str
    title: str
    source: str  # paper and section, or whose idea it is
    draft: str | None = "int4"
    depth: int | None = None
    slots: Callable[[Scene], np.ndarray] = equal_slots  # [L]
    order: int = LRU
    scores: Callable[[Scene], Scores] | None = None  # with order SCORED
    prefetch: Callable[[Scene], Prefetcher] = no_prefetch
    miss: int = LOAD
    verify_experts: Callable[[Scene], int] | None = None  # experts computed per layer at verification; None: all needed
    barrier: bool = False
    lossy: bool = False  # changes the output
    shares_weights: bool = True  # a draft uses the target's own other weights and KV cache (`plan.budget`)

    def depth_in(self, scene: Scene) -> int:
        """Drafted tokens per round in this scene; 0 without a draft."""
        if self.draft is None:
            return 0
        return scene.depth if self.depth is None else self.depth
