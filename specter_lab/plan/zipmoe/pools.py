"""How much of the budget goes to which form of expert: the grid search over pools F, C, S and E (ZipMoE's planner).

Ranks fill the pools in turn: the most popular experts are kept whole, the next compressed, then those of which one half is
kept. For every division of the budget the expected makespan of a layer is summed over how many active experts fall into
which pool. Given that k experts are active in all, independent draws and the conditional-Bernoulli model are the same law.

Experts of one token are not independent given their number, whatever the weights: hits come together. `plan_from_history`
takes the ranks that earlier layer calls really used instead of a model of them; the search is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from specter_lab.errors import UserError
from specter_lab.plan.zipmoe.ranks import elementary
from specter_lab.plan.zipmoe.schedule import by_blocks, timeline
from specter_lab.plan.zipmoe.work import Costs, State, shared_work_of, work_of

KEPT = (State.F, State.C, State.S, State.E)  # in the order that ranks fill them
STEPS = 12  # of the grid, along each pool


@dataclass(frozen=True)
class Sizes:
    """Bytes that an expert takes in every form."""

    full: int
    sign_mantissa: int
    exponents: int  # the largest expert's E-chunks

    def of(self, state: State) -> int:
        return {
            State.F: self.full, State.C: self.sign_mantissa + self.exponents, State.S: self.sign_mantissa,
            State.E: self.exponents, State.M: 0,
        }[state]  # fmt: skip


@dataclass(frozen=True)
class Pools:
    """Experts per layer in each form."""

    full: int = 0
    compressed: int = 0
    sign_mantissa: int = 0
    exponents: int = 0

    def __iter__(self) -> Iterator[int]:
        return iter((self.full, self.compressed, self.sign_mantissa, self.exponents))

    @property
    def by_state(self) -> dict[State, int]:
        return dict(zip(KEPT, self))

    def num_bytes(self, sizes: Sizes) -> int:
        return sum(count * sizes.of(state) for state, count in self.by_state.items())

    def __str__(self) -> str:
        return " ".join(f"{state}{count}" for state, count in self.by_state.items() if count) or "nothing"


@dataclass(frozen=True)
class Plan:
    """The division that was found, and what it promises."""

    pools: Pools
    makespan_s: float  # expected, of one layer call


def compositions(active: int) -> np.ndarray:
    """All ways to spread `active` experts over the four pools and M: [C, 5]."""
    bars = np.array(list(combinations(range(active + 4), 4)))  # [C, 4] stars and bars
    edges = np.concatenate([np.full((len(bars), 1), -1), bars, np.full((len(bars), 1), active + 4)], axis=1)
    return np.diff(edges, axis=1) - 1


@lru_cache(maxsize=64)
def makespans(costs: Costs, active: int) -> np.ndarray:
    """Makespan of ZipMoE's order for every composition: [C]."""
    return np.array([_makespan(costs, tuple(counts)) for counts in compositions(active).tolist()])


def expected_makespan(weights: np.ndarray, pools: Pools, active: int, costs: Costs) -> float:
    """Expected seconds of one layer call with `active` distinct experts, ranks filling the pools in turn."""
    law = composition_law(weights, pools, active)
    return float(law @ makespans(costs, active))


def composition_law(weights: np.ndarray, pools: Pools, active: int) -> np.ndarray:
    """Probability of every composition, given `active` experts in all: [C]."""
    edges = np.minimum(np.cumsum([0, *pools, len(weights)]), len(weights))
    counts = compositions(active)
    law = np.ones(len(counts))
    for pool in range(5):
        law *= elementary(weights[edges[pool] : edges[pool + 1]], active)[counts[:, pool]]
    return law / law.sum()


def plan_pools(weights: np.ndarray, active: int, costs: Costs, sizes: Sizes, budget_bytes: int) -> Plan:
    """The division of `budget_bytes` (one layer's share) with the least expected makespan, by grid search.

    Args:
        weights: [E] odds by rank (`ranks.bernoulli_weights`).
        active: distinct experts of a layer call.

    Raises:
        UserError: the budget is negative.
    """
    if budget_bytes < 0:
        raise UserError("the staging buffers alone are larger than the budget: give more memory")
    candidates = grid(len(weights), sizes, budget_bytes)
    best = min(candidates, key=lambda pools: (expected_makespan(weights, pools, active, costs), -pools.full))
    return Plan(best, expected_makespan(weights, best, active, costs))


def plan_from_history(rank_sets: np.ndarray, experts: int, costs: Costs, sizes: Sizes, budget_bytes: int) -> Plan:
    """As `plan_pools`, with the rank sets [N, k] of N earlier layer calls; a rank of -1 is none.

    Raises:
        UserError: the budget is negative.
    """
    if budget_bytes < 0:
        raise UserError("the staging buffers alone are larger than the budget: give more memory")
    below = _below(rank_sets, experts)
    seconds = {pools: _mean(below, pools, costs) for pools in grid(experts, sizes, budget_bytes)}
    best = min(seconds, key=lambda pools: (seconds[pools], -pools.full))
    return Plan(best, seconds[best])


def mean_makespan(rank_sets: np.ndarray, experts: int, pools: Pools, costs: Costs) -> float:
    """Mean seconds of the layer calls with these rank sets [N, k], ranks filling the pools in turn."""
    return _mean(_below(rank_sets, experts), pools, costs)


def _below(rank_sets: np.ndarray, experts: int) -> np.ndarray:
    """How many experts of each call have a rank below r: [E + 1, N]."""
    used = np.zeros((experts + 1, len(rank_sets)), np.int64)
    calls, slots = np.nonzero(rank_sets >= 0)
    np.add.at(used, (rank_sets[calls, slots] + 1, calls), 1)
    return used.cumsum(axis=0)


def _mean(below: np.ndarray, pools: Pools, costs: Costs) -> float:
    edges = np.minimum(np.cumsum([0, *pools]), len(below) - 1)
    counts = np.diff(below[[*edges, -1]], axis=0)  # [5, N] experts of each call in every pool and M
    base = int(below[-1].max()) + 1
    codes, times = np.unique(base ** np.arange(5) @ counts, return_counts=True)
    kinds = codes[:, None] // base ** np.arange(5) % base
    return float(sum(n * _makespan(costs, tuple(kind)) for kind, n in zip(kinds.tolist(), times)) / counts.shape[1])


@lru_cache(maxsize=100_000)
def _makespan(costs: Costs, counts: tuple[int, ...]) -> float:
    """Of ZipMoE's order, for so many experts in each pool and M, on the machine's shared cores and disk."""
    *kept, missing = counts
    ahead = min(missing, costs.ahead)  # both chunks are there, as in C
    found = zip((*KEPT, State.C, State.M), (*kept, ahead, missing - ahead))
    drawn = [state for state, count in found for _ in range(count)]
    order = by_blocks([work_of(i, state, costs) for i, state in enumerate(drawn)], costs.workers)
    shared = [shared_work_of(work.expert, drawn[work.expert], costs) for work in order]
    return timeline(shared, costs.workers).makespan_s


def grid(experts: int, sizes: Sizes, budget_bytes: int) -> list[Pools]:
    """Divisions that leave no room for one more expert in the last pool that is used."""
    found = set()
    for full in _steps(budget_bytes // sizes.full, experts):
        left = budget_bytes - full * sizes.full
        for compressed in _steps(left // sizes.of(State.C), experts - full):
            rest = left - compressed * sizes.of(State.C)
            for halves in _steps(rest // sizes.sign_mantissa, experts - full - compressed):
                last = (rest - halves * sizes.sign_mantissa) // sizes.exponents
                found.add(Pools(full, compressed, halves, min(int(last), experts - full - compressed - halves)))
    return sorted(found, key=tuple)


def _steps(room: int, experts: int) -> list[int]:
    """0 to as many as fit, in at most STEPS + 1 steps."""
    most = int(max(0, min(room, experts)))
    return sorted({round(most * i / STEPS) for i in range(STEPS + 1)})
