"""Belady's bound: the most hits that any demand policy can have, whatever it evicts, and even if it may keep nothing.

A pass needs a set of experts of every layer. Those that lie in the slots when the layer begins are hits; afterwards any
of the residents and of the experts just used may stay. An expert used in pass p hits in its next use q if it stays in between,
so slots are machines and the stretches p -> q jobs, of which at most `slots` overlap: keeping those that end first is
optimal. Experts used once need not take a slot (bypass), so this is at least as many hits as any policy in which a miss takes
one. Passes whose hits do not count (prefills) may be served without hits, so no slot waits for them.

The hits counted are distinct experts per layer and pass; prefetching policies are not bounded by this.

    best_hit_rates(workload, (6, 16, 32), 128)          # of plain decoding: what LRU, LFU or Belady can reach at most
    best_hit_rates(workload, (6, 16, 32), 128, depth=16)  # of windows of 16 drafted tokens, without prefetching
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specter_lab.plan.serve import Needs
from specter_lab.plan.workload import Workload


@dataclass(frozen=True)
class Passes:
    """Every target pass of a run, in order."""

    used: np.ndarray  # [P, L, E] bool
    counted: np.ndarray  # [P] bool; prefills are not


def passes_of(
    workload: Workload, requests: Sequence[int], new_tokens: int, batch: int = 1, *, depth: int = 0
) -> Passes:
    """The passes of `simulate` with the same arguments and a fixed depth."""
    used, counted = [], []
    for first in range(0, len(requests), batch):
        active = list(requests[first : first + batch])
        used.append(_used(workload.prefill(active), workload.windows.num_experts))
        counted.append(False)
        position = dict.fromkeys(active, 0)
        while active:
            now = workload.round(active, [position[request] for request in active], depth)
            used.append(_used(now.needs, workload.windows.num_experts))
            counted.append(True)
            for request, accepted in zip(active, now.accepted):
                position[request] += accepted + 1
            active = [request for request in active if position[request] < new_tokens]
    return Passes(np.stack(used), np.array(counted))


def next_uses(used: np.ndarray) -> np.ndarray:
    """The pass of every expert's next use after each pass; P when there is none: [P, L, E] int32."""
    following = np.empty(used.shape, np.int32)
    coming = np.full(used.shape[1:], len(used), np.int32)
    for p in reversed(range(len(used))):
        following[p] = coming
        coming = np.where(used[p], p, coming)
    return following


def most_hits(passes: Passes, slots: np.ndarray) -> np.ndarray:
    """The largest possible number of counted hits of every layer: [L].

    Args:
        slots: [L] per layer.
    """
    end = len(passes.used)
    following = next_uses(passes.used)
    never = ~np.append(passes.counted, False)[following]  # a next use that does not count, or none
    following[never] = end
    kept = np.zeros(passes.used.shape[1:], bool)  # [L, E]
    hits = np.zeros(len(slots), np.int64)
    for now, ends, counted in zip(passes.used, following, passes.counted):
        if counted:
            hits += (kept & now).sum(axis=1)
        candidates = np.where(kept | now, ends, end)
        rank = candidates.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
        kept = (candidates < end) & (rank < slots[:, None])
    return hits


def best_hit_rate(passes: Passes, slots: np.ndarray) -> float:
    """`most_hits` over all experts needed in counted passes; NaN without any."""
    needed = int(passes.used[passes.counted].sum())
    return float(most_hits(passes, slots).sum() / needed) if needed else float("nan")


def best_hit_rates(
    workload: Workload, slots_per_layer: Sequence[int], new_tokens: int, *, depth: int = 0
) -> dict[int, float]:
    """`best_hit_rate` over all requests, each decoded by itself from empty slots, by slots in every layer."""
    hits, needed = dict.fromkeys(slots_per_layer, 0), 0
    for request in range(workload.requests):
        passes = passes_of(workload, [request], new_tokens, depth=depth)
        needed += int(passes.used[passes.counted].sum())
        for count in hits:
            hits[count] += int(most_hits(passes, np.full(workload.layers, count)).sum())
    return {count: found / needed for count, found in hits.items()}


def _used(needs: Needs, num_experts: int) -> np.ndarray:
    layers = len(needs.first) - 1
    used = np.zeros((layers, num_experts), bool)
    used[np.repeat(np.arange(layers), np.diff(needs.first)), needs.experts] = True
    return used
