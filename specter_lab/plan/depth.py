"""How deep to speculate: K* = argmin TPOT(K), from measured rounds and simulated round times (Specter, section SIC).

TPOT has three definitions here, because they do not agree. A request commits its tokens
in bursts, one per round; with N new tokens,

    paper    (last commit - first commit) / (N - 1): the first burst, up to K+1 tokens, costs nothing, so it flatters
             deep speculation
    steady   time per committed token over all rounds but the first, complete bursts counted: what a long text costs
    decode   last commit / N: from the first draft step to the end; a burst beyond N is wasted
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from specter_lab.measure.acceptance import Residency
from specter_lab.measure.bootstrap import resample_counts
from specter_lab.measure.speculate import Rounds
from specter_lab.models.anatomy import Anatomy
from specter_lab.plan.cost import RoundCost, round_cost
from specter_lab.plan.hardware import Profile


@dataclass(frozen=True)
class Tpot:
    """One definition of TPOT as a ratio of per-request sums: all requests together cost sum(ms) / sum(tokens)."""

    ms: np.ndarray  # [R]
    tokens: np.ndarray  # [R]


@dataclass(frozen=True)
class BestDepth:
    """The depth with the smallest TPOT, and the range of those that win in resampled requests."""

    depth: int
    low: int
    high: int
    n_requests: int


def round_costs(
    rounds: Rounds, residency: Residency, model: Anatomy, profile: Profile, slots: float
) -> list[RoundCost]:
    """Simulated cost of every round; its experts, residents and prediction are the measured ones."""
    missing = residency.distinct - residency.resident
    predicted_share = np.divide(residency.predicted, missing, out=np.ones_like(missing), where=missing > 0)
    columns = (residency.distinct, residency.resident, predicted_share, rounds.position)
    return [
        round_cost(
            model, profile, depth=rounds.depth, distinct_experts=distinct, resident_experts=resident, slots=slots,
            predicted_share=share, context_tokens=int(position),
        )
        for distinct, resident, share, position in zip(*columns)
    ]  # fmt: skip


def tpot_definitions(rounds: Rounds, round_ms: np.ndarray, new_tokens: int) -> dict[str, Tpot]:
    """TPOT of `new_tokens` tokens per request, by definition: "paper", "steady" and "decode"."""
    sums: dict[str, list[tuple[float, float]]] = {"paper": [], "steady": [], "decode": []}
    for request in np.unique(rounds.request):
        mine = rounds.request == request
        ms, tokens = round_ms[mine], rounds.accepted[mine] + 1
        sums["paper"].append((ms[1:].sum(), new_tokens - 1))
        sums["steady"].append((ms[1:].sum(), tokens[1:].sum()))
        sums["decode"].append((ms.sum(), new_tokens))
    return {name: Tpot(*np.array(pairs).T) for name, pairs in sums.items()}


def best_depth(
    by_depth: Mapping[int, Tpot], *, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> BestDepth:
    """K* over the depths given, measured on the same requests; the range is that of the bootstrap over requests.

    Raises:
        UserError: fewer than two requests.
    """
    depths = np.array(list(by_depth))
    ms, tokens = (np.stack([getattr(tpot, name) for tpot in by_depth.values()], axis=1) for name in ("ms", "tokens"))
    drawn = resample_counts(len(ms), resamples, seed)  # [B, R]
    winners = depths[((drawn @ ms) / (drawn @ tokens)).argmin(axis=1)]  # [B]
    tail = (1 - confidence) / 2
    low, high = np.quantile(winners, (tail, 1 - tail), method="nearest")
    return BestDepth(int(depths[(ms.sum(axis=0) / tokens.sum(axis=0)).argmin()]), int(low), int(high), len(ms))
