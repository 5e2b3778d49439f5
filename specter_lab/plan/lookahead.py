"""What the draft's routing tells about the experts that verification will need (Specter, section PIO).

The expert lookahead buffer (ELB) counts, after t drafted tokens, how many of them use each expert: cnt_t[j, e]. Paper mode
cuts the draft into chunks. At a boundary every layer's top-M experts by count are planned, those not resident are
copied, and the next boundary is set so that drafting until then takes about as long as the copies:

    Cold Start          up to the first boundary at max(1, floor(0.2 K)) drafted tokens: too little is known to plan
    Prefetch Overlap    plan, copy, next = now + max(1, ceil(bytes / bandwidth / step time)), both running estimates
    Final Cleanup       from when every layer has M predictions, or the next boundary lies beyond K: no more boundaries, and
                        one last plan when the draft has ended, before the barrier

The paper names three phases and says when the third begins; that its plan is made at the draft's end, of all K tokens, is our
reading (`policies/specter.py`). `policies/specter_early.py` has the other one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specter_lab.compiled import compiled
from specter_lab.plan.residency import ABSENT, Slots, release_all

COLD_START = 0.2  # share of the K drafted tokens before the first boundary
FIRST_BANDWIDTH_GB_S, FIRST_STEP_MS, KEPT = 12.0, 1.0, 0.75  # first estimates, and the old one's share in the average


class Lookahead:
    """The ELB of one round: [L, E] counts over the drafted tokens of one request, or of several together."""

    def __init__(self, layers: int, num_experts: int) -> None:
        self.counts = np.zeros((layers, num_experts), dtype=np.int32)
        self._rows = np.arange(layers)[:, None]

    def observe(self, experts: np.ndarray) -> None:
        """Count one drafted token's experts [L, k]; those of B requests one after the other merge their windows."""
        self.counts[self._rows, experts] += 1  # a token uses an expert once, so no index repeats

    def full(self, limits: np.ndarray) -> bool:
        """Whether every layer has as many predictions as `limits` [L] allows."""
        return bool(((self.counts > 0).sum(axis=1) >= limits).all())


@compiled
def plan_top(counts: np.ndarray, slots: Slots) -> tuple[np.ndarray, np.ndarray]:
    """Pin every layer's top-M experts by ELB count (M: its slots; ties: the lower number), drop all other pins.

    Args:
        counts: [L, E] of a `Lookahead`.
        slots: changed in place.

    Returns:
        The planned experts that are absent, as (layers, experts): layer by layer, most used first.
    """
    num_layers = len(counts)
    layers, experts, found = np.empty(slots.count.sum(), np.int64), np.empty(slots.count.sum(), np.int64), 0
    for layer in range(num_layers):
        release_all(slots, layer)
        order = np.argsort(-counts[layer], kind="mergesort")
        for expert in order[: slots.count[layer]]:
            if counts[layer, expert] == 0:
                break
            slots.pinned[layer, expert] = True
            if slots.slot_of[layer, expert] == ABSENT:
                layers[found], experts[found] = layer, expert
                found += 1
    return layers[:found], experts[:found]


@dataclass
class Boundaries:
    """When to plan next, in drafted tokens; keeps the two running estimates from round to round."""

    bandwidth_gb_s: float = FIRST_BANDWIDTH_GB_S
    step_ms: float = FIRST_STEP_MS

    def first(self, depth: int) -> int:
        """Drafted tokens before the first plan of a round of `depth`."""
        return max(1, math.floor(COLD_START * depth))

    def after(self, now: int, copied_bytes: float) -> int:
        """The boundary after the one at `now` tokens, which started copies of `copied_bytes`."""
        copies_ms = copied_bytes / self.bandwidth_gb_s * 1e-6
        return now + max(1, math.ceil(copies_ms / self.step_ms))

    def observe_step(self, ms: float) -> None:
        """One draft step took `ms`."""
        self.step_ms = KEPT * self.step_ms + (1 - KEPT) * ms

    def observe_copy(self, copied_bytes: float, ms: float) -> None:
        """A chunk of copies took `ms`."""
        if copied_bytes:
            self.bandwidth_gb_s = KEPT * self.bandwidth_gb_s + (1 - KEPT) * copied_bytes / ms * 1e-6
