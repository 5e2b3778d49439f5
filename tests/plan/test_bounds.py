"""Belady's bound: equal to brute force on small cases, never beaten by a demand policy."""

from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_lab.measure.windows import read_windows
from specter_lab.paths import CACHE
from specter_lab.plan.bounds import Passes, best_hit_rate, best_hit_rates, most_hits, next_uses, passes_of
from specter_lab.plan.policies import POLICIES, find_policy
from specter_lab.plan.residency import FIFO, LFU, LRU
from specter_lab.plan.serve import NEEDED, NEEDED_IN_FLIGHT, NEEDED_READY, READ_THROUGH
from specter_lab.plan.simulate import simulate
from specter_lab.plan.workload import Workload
from tests.plan.made import scene_of, windows_of

DEMAND = [p for p in POLICIES.values() if p.draft is None and p.id in ("lru", "fifo", "lfu", "belady")]
RECORDED = sorted((CACHE / "windows").glob("*-int4-*.safetensors"))


def brute_force(sets, counted, slots):
    """The most hits over everything that may stay after every pass."""

    @cache
    def best(p, kept):
        if p == len(sets):
            return 0
        hits = len(kept & sets[p]) if counted[p] else 0
        there = sorted(kept | sets[p])
        stay = (frozenset(c) for size in range(min(slots, len(there)) + 1) for c in combinations(there, size))
        return hits + max(best(p + 1, kept) for kept in stay)

    return best(0, frozenset())


@settings(max_examples=60)
@given(
    passes=st.lists(st.tuples(st.frozensets(st.integers(0, 4), min_size=1, max_size=3), st.booleans()), min_size=1, max_size=7),
    slots=st.integers(1, 4),
)  # fmt: skip
def test_equals_brute_force(passes, slots):
    sets, counted = zip(*passes)
    used = np.zeros((len(sets), 1, 5), bool)
    for row, experts in zip(used, sets):
        row[0, list(experts)] = True
    found = most_hits(Passes(used, np.array(counted)), np.array([slots]))
    assert found.tolist() == [brute_force(sets, counted, slots)]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000), slots=st.integers(1, 8), depth=st.integers(0, 3), batch=st.integers(1, 3),
    order=st.sampled_from([LRU, FIFO, LFU]), miss=st.sampled_from([0, READ_THROUGH]),
)  # fmt: skip
def test_no_demand_policy_beats_it(seed, slots, depth, batch, order, miss):
    workload, scene = scene_of(windows_of(seed, depth=3), slots, depth=depth)
    policy = replace(find_policy("lru"), order=order, miss=miss, draft="int4" if depth else None)
    hits = simulate(workload, policy, scene, new_tokens=12, batch=batch).hits.counts
    passes = passes_of(workload, range(3), 12, batch, depth=depth)
    assert passes.used[passes.counted].sum() == hits[NEEDED]
    bound = most_hits(passes, np.full(scene.layers, min(slots, scene.num_experts))).sum()
    assert hits[NEEDED_READY] + hits[NEEDED_IN_FLIGHT] <= bound


@pytest.mark.parametrize("batch", [1, 3])
def test_belady_in_the_simulator_is_the_best_when_a_pass_fits(batch):
    """It differs from the bound in that a miss has to take a slot."""
    workload, scene = scene_of(windows_of(positions=40, experts=12, requests=6), slots=3 * batch)
    rates = {p.id: simulate(workload, p, scene, new_tokens=40, batch=batch).hits.rates()["distinct"] for p in DEMAND}
    bound = best_hit_rate(passes_of(workload, range(6), 40, batch), np.full(scene.layers, 3 * batch))
    assert max(rates, key=rates.get) == "belady"
    assert rates["belady"] <= bound


@pytest.mark.parametrize("depth", [0, 3])
def test_rates_by_slots_bound_every_demand_policy(depth):
    """Every request by itself, from empty slots: more slots, more hits, and no order has more."""
    workload, scene = scene_of(windows_of(depth=3, positions=20), depth=depth)
    bounds = best_hit_rates(workload, (1, 3, 8), 20, depth=depth)
    assert list(bounds) == [1, 3, 8] and 0 < bounds[1] < bounds[3] < bounds[8] < 1
    for slots, bound in bounds.items():
        for policy in DEMAND:
            policy = replace(policy, draft="int4" if depth else None)
            if depth and policy.id == "belady":
                continue
            counts = sum(
                simulate(
                    workload, policy, replace(scene, slots_per_layer=slots), new_tokens=20, requests=[r]
                ).hits.counts
                for r in range(3)
            )
            assert (counts[NEEDED_READY] + counts[NEEDED_IN_FLIGHT]) / counts[NEEDED] <= bound
    one = best_hit_rate(passes_of(workload, [1], 20, depth=depth), np.full(scene.layers, 3))
    only = Workload(workload.windows.of(np.array([1])), workload.layers)
    assert best_hit_rates(only, (3,), 20, depth=depth)[3] == one


def test_uneven_slots_count_per_layer():
    workload, _ = scene_of(windows_of(positions=20))
    passes = passes_of(workload, range(3), 20)
    few, many = most_hits(passes, np.array([2, 2, 2])), most_hits(passes, np.array([2, 8, 2]))
    assert few[0] == many[0] and few[2] == many[2] and few[1] < many[1]


def test_next_uses():
    used = np.array([[1, 0], [0, 1], [1, 0]], bool)[:, None]
    assert next_uses(used)[:, 0].tolist() == [[2, 1], [2, 3], [3, 3]]


def test_nothing_counted_has_no_rate():
    assert np.isnan(best_hit_rate(Passes(np.ones((2, 1, 3), bool), np.zeros(2, bool)), np.array([1])))


@pytest.mark.skipif(not RECORDED, reason="no recorded windows here")
@pytest.mark.parametrize("path", RECORDED[-1:], ids=lambda path: Path(path).stem)
def test_not_beaten_on_recorded_windows(path):
    windows = read_windows(path)
    windows = windows.of(np.arange(3))
    workload, scene = scene_of(windows, slots=windows.num_experts // 4)
    bound = most_hits(passes_of(workload, range(3), 64), np.full(windows.layers, scene.slots_per_layer)).sum()
    for policy in DEMAND:
        hits = simulate(workload, policy, scene, new_tokens=64).hits.counts
        assert hits[NEEDED_READY] + hits[NEEDED_IN_FLIGHT] <= bound
