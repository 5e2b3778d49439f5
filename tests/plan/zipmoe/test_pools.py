"""The planner: laws that sum to one, divisions within the budget, optimal against a finer search; the pools as a state machine."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_lab.errors import UserError
from specter_lab.plan.zipmoe import pools as planning
from specter_lab.plan.zipmoe.cache import RULES, PoolCache
from specter_lab.plan.zipmoe.pools import KEPT, Pools, Sizes, plan_pools
from specter_lab.plan.zipmoe.ranks import bernoulli_weights, inclusion
from specter_lab.plan.zipmoe.work import Costs, State

SIZES = Sizes(full=200, sign_mantissa=100, exponents=34)
SLOW_DISK = Costs(read_sm_s=10, read_shard_s=1.1, decompress_s=0.2, recover_s=0.1, execute_s=1, shards=3, workers=2)
SLOW_CPU = Costs(read_sm_s=1, read_shard_s=0.1, decompress_s=9, recover_s=0.1, execute_s=1, shards=3, workers=2)


def weights(experts=16, active=3):
    return bernoulli_weights(inclusion(np.geomspace(100, 1, experts), active), active)


def test_compositions_and_their_law():
    counts = planning.compositions(3)
    assert len(counts) == 35 and (counts.sum(axis=1) == 3).all() and len(np.unique(counts, axis=0)) == 35
    law = planning.composition_law(weights(), Pools(2, 3, 1, 4), 3)
    assert law.sum() == pytest.approx(1) and (law >= 0).all()
    mean = law @ counts
    pi = inclusion(np.geomspace(100, 1, 16), 3)
    assert mean[0] == pytest.approx(pi[:2].sum(), abs=1e-4)


def test_everything_in_memory_costs_only_computing():
    assert planning.expected_makespan(weights(), Pools(16), 3, SLOW_DISK) == pytest.approx(3)


@pytest.mark.parametrize("budget", [0, 150, 800, 1600])
@pytest.mark.parametrize("costs", [SLOW_DISK, SLOW_CPU])
def test_plans_stay_within_the_budget_and_nothing_simple_is_better(budget, costs):
    plan = plan_pools(weights(), 3, costs, SIZES, budget)
    assert plan.pools.num_bytes(SIZES) <= budget
    for simple in (Pools(budget // 200), Pools(0, budget // 134), Pools(0, 0, budget // 100), Pools()):
        assert plan.makespan_s <= planning.expected_makespan(weights(), simple, 3, costs) + 1e-9


def test_a_slow_disk_asks_for_compressed_experts_and_a_slow_processor_for_whole_ones():
    assert plan_pools(weights(), 3, SLOW_DISK, SIZES, 1000).pools.compressed > 0
    assert plan_pools(weights(), 3, SLOW_CPU, SIZES, 1000).pools.full == 5


BETWEEN = Costs(read_sm_s=3, read_shard_s=0.4, decompress_s=0.6, recover_s=0, execute_s=1, shards=3, workers=2)


def test_cores_that_execution_and_decompression_share_ask_for_whole_experts():
    """Beside each other they hide decompression behind reading; on cores that are shared it has to be paid for."""
    plans = {
        cores: plan_pools(weights(), 3, replace(BETWEEN, cores=cores), SIZES, 1000).pools for cores in (8.0, 2.0, 1.2)
    }
    assert plans[8.0].compressed > 0
    assert plans[1.2] == Pools(full=5)
    assert plans[8.0].full <= plans[2.0].full <= plans[1.2].full


def test_experts_that_are_read_ahead_are_as_good_as_compressed_ones():
    costs = replace(SLOW_DISK, cores=2.0)
    found = [
        planning.expected_makespan(weights(), Pools(3), 3, replace(costs, ahead=ahead)) for ahead in (0, 1, 2, 3, 9)
    ]
    assert found == sorted(found, reverse=True) and found[0] > found[1] > found[3] == found[4]
    assert found[3] == pytest.approx(planning.expected_makespan(weights(), Pools(3, 13), 3, costs))


def test_a_plan_from_history_sees_what_comes_together():
    """Calls use ranks 0-2 or 9-11 together; the mean of every call is counted by hand."""
    history = np.array([[0, 1, 2]] * 6 + [[9, 10, 11]] * 2 + [[0, 1, -1]] * 2)
    pools = Pools(2, 0, 0, 1)
    one = planning.expected_makespan  # with certain ranks the model and the history agree
    certain = np.array([1e9] * 3 + [1e-9] * 13)
    assert planning.mean_makespan(history[:6], 16, pools, SLOW_DISK) == pytest.approx(one(certain, pools, 3, SLOW_DISK))
    parts = [planning.mean_makespan(history[a:b], 16, pools, SLOW_DISK) for a, b in ((0, 6), (6, 8), (8, 10))]
    whole = planning.mean_makespan(history, 16, pools, SLOW_DISK)
    assert whole == pytest.approx(0.6 * parts[0] + 0.2 * parts[1] + 0.2 * parts[2])
    assert parts[2] == pytest.approx(2), "two experts that are whole in memory only execute"
    plan = planning.plan_from_history(history, 16, SLOW_DISK, SIZES, 800)
    assert plan.pools.num_bytes(SIZES) <= 800 and plan.makespan_s <= planning.mean_makespan(
        history, 16, Pools(4), SLOW_DISK
    )


def test_a_negative_budget_is_refused():
    with pytest.raises(UserError, match="staging"):
        plan_pools(weights(), 3, SLOW_DISK, SIZES, -1)


def test_lru_by_hand():
    cache = PoolCache(Pools(2), "lru", np.full(4, 0.25))
    for expert in (0, 1, 0, 2):
        cache.use([expert])
    assert sorted(cache.members(State.F)) == [0, 2]


def test_what_the_full_pool_evicts_leaves_its_sign_mantissa():
    cache = PoolCache(Pools(1, 0, 1), "lru", np.full(4, 0.25))
    cache.use([0])
    moves = cache.use([1])
    assert [(m.expert, m.before, m.after) for m in moves] == [(0, "F", "S"), (1, "M", "F")]
    assert cache.state(0) is State.S


def test_the_rank_rule_keeps_the_popular_ones():
    cache = PoolCache(Pools(1, 1), "rank", np.array([0.4, 0.3, 0.2, 0.1]))
    for _ in range(30):
        cache.use([0, 1])
    cache.use([3])
    assert cache.state(0) is State.F and cache.state(1) is State.C and cache.state(3) is State.M


def test_unknown_rules_are_refused():
    with pytest.raises(UserError, match="no eviction rule"):
        PoolCache(Pools(1), "best", np.full(4, 0.25))


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(*[st.integers(0, 3)] * 4), st.sampled_from(RULES),
    st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=4), max_size=40),
)  # fmt: skip
def test_places_are_never_exceeded_and_moves_tell_everything(sizes, rule, calls):
    cache, mirror = PoolCache(Pools(*sizes), rule, np.full(10, 0.1)), {}
    for used in calls:
        cache.observe(sorted(used))
        moves = []
        for expert in sorted(used):
            moves += (mine := cache.admit(expert))
            assert all(move.expert != expert for move in mine[:-1]), "what it lends is not taken from it"
        for move in moves:
            assert mirror.get(move.expert, State.M) is move.before is not move.after
            mirror[move.expert] = move.after
            for state, room in zip(KEPT, sizes):
                assert sum(s is state for s in mirror.values()) <= room
        assert all(cache.state(e) is mirror.get(e, State.M) for e in range(10))
        assert sorted(e for s in KEPT for e in cache.members(s)) == [
            e for e, s in sorted(mirror.items()) if s is not State.M
        ]
