"""Hit curves against LRU caches kept as lists, and divisions of slots against all there are."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from specter_lab.plan.bounds import passes_of
from specter_lab.plan.policies import find_policy
from specter_lab.plan.simulate import simulate
from specter_lab.plan.slots import divide, lru_hits
from specter_lab.plan.workload import Workload
from tests.plan.made import scene_of, windows_of


@pytest.mark.parametrize("depth", [0, 4])
def test_hit_curves_are_those_of_lru(depth):
    workload = Workload(windows_of(positions=40, layers=2), 2)
    passes = passes_of(workload, [0], 40, depth=depth)
    hits = lru_hits(passes.used)
    for layer, slots in product(range(2), range(2, 9)):
        recent, found = [], 0
        for used in passes.used[:, layer]:
            now = np.flatnonzero(used).tolist()
            found += sum(e in recent[:slots] for e in now)
            recent = now + [e for e in recent if e not in now]
        assert hits[layer, slots] == found


def test_the_division_of_slots_is_the_best_there_is():
    generator = np.random.default_rng(0)
    for _ in range(20):
        hits = np.concatenate([np.zeros((3, 1)), generator.integers(0, 9, (3, 4))], axis=1)  # not even increasing
        total = int(generator.integers(3, 13))
        best = max(
            sum(hits[layer, c] for layer, c in enumerate(slots))
            for slots in product(range(1, 5), repeat=3)
            if sum(slots) == total
        )
        slots = divide(hits, total)
        assert slots.sum() == total and slots.min() >= 1
        assert hits[np.arange(3), slots].sum() == best


@pytest.mark.parametrize(("name", "slots"), [("adapmoe", 2), ("specter-uneven", 4)])
def test_uneven_slots_follow_the_layers(name, slots):
    """A layer whose tokens all use the same experts needs no more than those."""
    windows, rule = windows_of(positions=40, layers=2, requests=2), find_policy(name).slots
    steady = windows.target.copy()
    steady[:, :, :, 0] = np.array([0, 1], np.uint8)
    _, scene = scene_of(windows, slots=slots, history=replace(windows, target=steady))
    divided, equal = rule(scene), rule(replace(scene, history=None))
    assert divided.sum() == equal.sum() and divided[0] == 2
    assert len(set(equal)) == 1


def test_uneven_slots_hit_more_where_layers_differ():
    windows = windows_of(positions=40, layers=2, requests=2)
    target, draft = windows.target.copy(), windows.draft.copy()
    for used in (target, draft):
        used[:, :, :, 0] = np.array([0, 1], np.uint8)
    same = replace(windows, target=target, draft=draft)
    workload, scene = scene_of(same, slots=4, history=same)
    even, uneven = (
        simulate(workload, find_policy(name), scene, new_tokens=40) for name in ("specter-fast", "specter-uneven")
    )
    assert uneven.hits.rates()["distinct"] > even.hits.rates()["distinct"]
