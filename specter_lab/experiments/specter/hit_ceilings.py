"""The most hits that could be: what stands beside every hit rate of specter-hit-rate. Measured; no clock has a part in it.

Two ceilings, and every policy has the lower one that is true for it:

    demand loading    nothing is there that an earlier pass did not use: `plan.bounds.best_hit_rate` of the same slots, which
                      no victim order beats, Belady's (`policies/belady.py`) included
    prefetching       the best contents of the slots, chosen anew for every window and layer by someone who knows it

The prefetching policy "oracle" is no ceiling: it knows the coming window, but plans one window at a time, copies no faster
than the link, and stops copying when the verification begins. A policy that guesses can end up ahead of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from specter_lab.plan import serve
from specter_lab.plan.bounds import Passes, most_hits, passes_of
from specter_lab.plan.policy import Policy, Scene, no_prefetch
from specter_lab.plan.workload import Workload

DISTINCT, TOKEN_WEIGHTED, TOKEN_STEP = "distinct", "token-weighted", "token-step"
DRAFT_COUNTED = "token-weighted, draft counted"
IN_FLIGHT = "{}, in flight counted"
DEFINITIONS = (DISTINCT, IN_FLIGHT.format(DISTINCT), TOKEN_WEIGHTED, IN_FLIGHT.format(TOKEN_WEIGHTED), TOKEN_STEP, DRAFT_COUNTED)  # fmt: skip


def demand_ceiling(workload: Workload, new_tokens: int) -> Callable[[np.ndarray], float]:
    """`best_demand_rate` of every request by itself, as a function of the slots; each answer is computed once."""
    passes = [passes_of(workload, [request], new_tokens, depth=0) for request in range(workload.requests)]

    @cache
    def of_slots(slots: tuple[int, ...]) -> float:
        return best_demand_rate(passes, np.array(slots))

    return lambda slots: of_slots(tuple(slots.tolist()))


def demand_only(policy: Policy) -> bool:
    """Whether `plan.bounds` bounds it: nothing is drafted and nothing copied ahead."""
    return policy.draft is None and policy.prefetch is no_prefetch


def ceilings(
    workload: Workload, policy: Policy, scene: Scene, demand: Callable[[np.ndarray], float], new_tokens: int
) -> dict[str, float]:
    """By definition, the most that could be. Nothing for policies that verify with fewer experts than are needed.

    Args:
        demand: `demand_ceiling` of the same text.
    """
    if policy.verify_experts is not None:
        return {}
    slots = policy.slots(scene)
    if demand_only(policy):  # one token a pass: an expert is used once, so all definitions have one ceiling
        return dict.fromkeys(DEFINITIONS, demand(slots))
    return best_window_rates(workload, slots, policy.depth_in(scene), new_tokens)


def best_demand_rate(passes: Sequence[Passes], slots: np.ndarray) -> float:
    """`plan.bounds.best_hit_rate` of requests that begin with empty slots: hits of all over needs of all."""
    needed = sum(int(of.used[of.counted].sum()) for of in passes)
    return float(sum(most_hits(of, slots).sum() for of in passes) / needed)


def best_window_rates(workload: Workload, slots: np.ndarray, depth: int, new_tokens: int) -> dict[str, float]:
    """What slots filled with the best experts of every window and layer would give.

    In flight or ready makes no difference to it. A token-step hit is a hit for each of its uses, so "token-step" has the
    ceiling of "token-weighted".
    """
    held, needed, held_uses, uses, draft_uses = 0, 0, 0, 0, 0
    for request in range(workload.requests):
        position = 0
        while position < new_tokens:
            now = workload.round([request], [position], depth)
            distinct, best = best_contents(now.needs, slots)
            held, needed = held + distinct, needed + len(now.needs.experts)
            held_uses, uses = held_uses + best, uses + int(now.needs.uses.sum())
            draft_uses += sum(step.size for step in now.drafted)
            position += now.accepted[0] + 1
    shares = {DISTINCT: held / needed, TOKEN_WEIGHTED: held_uses / uses}
    in_flight = {IN_FLIGHT.format(definition): share for definition, share in shares.items()}
    counted = {DRAFT_COUNTED: (held_uses + draft_uses) / (uses + draft_uses), TOKEN_STEP: shares[TOKEN_WEIGHTED]}
    return shares | in_flight | counted


def best_contents(needs: serve.Needs, slots: np.ndarray) -> tuple[int, int]:
    """Of one window, the experts that `slots` [L] can hold, and the most uses they can have."""
    per_layer = np.diff(needs.first)  # [L]
    layer = np.repeat(np.arange(len(slots)), per_layer)
    order = np.lexsort((-needs.uses, layer))
    rank = np.arange(len(order)) - needs.first[layer]
    return int(np.minimum(per_layer, slots).sum()), int(needs.uses[order][rank < slots[layer]].sum())
