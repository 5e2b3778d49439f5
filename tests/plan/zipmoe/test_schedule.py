"""Orders of a layer's work: by hand, against the lower bound and the exhaustive optimum, and the paper's factor."""

import itertools
import random
from dataclasses import replace

import pytest

from specter_lab.plan.zipmoe.schedule import ORDERS, blocks, by_blocks, lower_bound, optimum, timeline
from specter_lab.plan.zipmoe.work import Costs, State, Work, shared_work_of, work_of

COSTS = Costs(read_sm_s=4, read_shard_s=1, decompress_s=2, recover_s=0.5, execute_s=1, shards=3, workers=2)


def random_works(rng, count):
    works = []
    for expert in range(count):
        io = rng.choice([0.0, rng.uniform(0.1, 4)])
        shards = tuple(rng.uniform(0.1, 2) for _ in range(rng.choice([0, 1, 3])))
        works.append(Work(expert, io, shards, rng.uniform(0.1, 2)))
    return works


def test_work_of_every_state():
    assert work_of(0, State.F, COSTS) == Work(0, 0.0, (), 1)
    assert work_of(0, State.C, COSTS) == Work(0, 0.0, (2, 2, 2), 1.5)
    assert work_of(0, State.S, COSTS) == Work(0, 0.0, (3, 3, 3), 1.5)
    assert work_of(0, State.E, COSTS) == Work(0, 4, (2, 2, 2), 1.5)
    assert work_of(0, State.M, COSTS) == Work(0, 4, (3, 3, 3), 1.5)
    assert [work_of(0, s, COSTS).type_one for s in State] == [False, False, False, True, True]


def test_a_timeline_by_hand():
    """Two workers: shards 3 + 3 at once, the third from 3 to 6; SM at 4; ready at 6, executed at 7.5."""
    done = timeline([work_of(0, State.M, COSTS)], 2)
    assert (done.makespan_s, done.io_s, done.workers_s, done.waiting_s) == (7.5, 4, 6, 6)
    both = timeline([work_of(0, State.M, COSTS), work_of(1, State.F, COSTS)], 2)
    assert both.makespan_s == 7.5 and both.ready_s == (6, 0)  # the resident one ran while the other was fetched
    assert timeline([], 2).makespan_s == lower_bound([], 2) == 0


def test_blocks_by_hand():
    """One read of 4 s; Type-II experts with 3 s of work for each of two workers fill it."""
    works = [work_of(i, state, COSTS) for i, state in enumerate([State.C, State.E, State.C, State.E, State.F])]
    found = [[w.expert for w in block] for block in blocks(works, 2)]
    assert found == [[1, 0], [3, 2], [4]]
    assert sorted(w.expert for w in by_blocks(works, 2)) == list(range(5))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_no_order_beats_the_bound_and_none_is_worse_than_the_papers_factor(workers):
    rng = random.Random(workers)
    for _ in range(60):
        works = random_works(rng, rng.randint(1, 4))
        bound, best = lower_bound(works, workers), optimum(works, workers)
        assert bound <= best + 1e-9
        for name, order in ORDERS.items():
            arranged = order(works, workers)
            assert sorted(w.expert for w in arranged) == sorted(w.expert for w in works)
            assert best <= timeline(arranged, workers).makespan_s + 1e-9, name
        assert timeline(by_blocks(works, workers), workers).makespan_s <= (3 - 1 / workers) * best + 1e-9


def test_the_bound_holds_for_every_order_of_single_shards():
    """Shards in any order and reads in any order, which the optimum over whole experts does not try."""
    rng = random.Random(0)
    for _ in range(20):
        works = [Work(i, rng.uniform(0.1, 2), (rng.uniform(0.1, 2), rng.uniform(0.1, 2)), 0.5) for i in range(2)]
        bound = lower_bound(works, 2)
        tasks = [(w.expert, s) for w in works for s in w.shard_s]
        for order, reads in itertools.product(itertools.permutations(tasks), itertools.permutations(works)):
            free, ready, now = [0.0, 0.0], dict.fromkeys((0, 1), 0.0), 0.0
            for read in reads:
                now += read.io_s
                ready[read.expert] = now
            for expert, seconds in order:
                free.sort()
                free[0] += seconds
                ready[expert] = max(ready[expert], free[0])
            end = 0.0
            for at in sorted(ready.values()):
                end = max(end, at) + 0.5
            assert bound <= end + 1e-9


def test_the_optimum_refuses_many():
    with pytest.raises(ValueError, match="at most five"):
        optimum([Work(i, 1, (1,), 1) for i in range(6)], 2)


def test_shared_cores_and_one_disk_lengthen_what_threads_would_do_alone():
    alone = work_of(0, State.M, COSTS)
    assert shared_work_of(0, State.M, COSTS) == alone
    two, many = (shared_work_of(0, State.M, replace(COSTS, cores=cores)) for cores in (2.0, 8.0))
    assert many.io_s == two.io_s == COSTS.read_sm_s + 3 * COSTS.read_shard_s  # whoever reads waits for the same disk
    assert many.shard_s == (COSTS.decompress_s,) * 3
    assert two.shard_s == (2 * COSTS.decompress_s,) * 3  # two workers on the core that the executor leaves
    assert shared_work_of(0, State.S, replace(COSTS, cores=2.0)).io_s == 3 * COSTS.read_shard_s
    assert shared_work_of(0, State.F, replace(COSTS, cores=1.0)) == work_of(0, State.F, COSTS)
    starved = [shared_work_of(0, State.C, replace(COSTS, cores=cores)).cpu_s for cores in (2.0, 1.5, 1.0)]
    assert starved == sorted(starved) and starved[0] < starved[-1]
    for workers in (1, 2, 3):  # and the executor share one core: each has a part of workers + 1
        one = shared_work_of(0, State.C, replace(COSTS, workers=workers, cores=1.0))
        assert one.shard_s == pytest.approx(((workers + 1) * COSTS.decompress_s,) * 3)
