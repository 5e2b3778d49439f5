from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest

from specter_lab.measure.locality import (
    last_uses,
    lru_held,
    lru_residents,
    reuse_distances,
    uniform_reuse,
    window_reuse,
)
from tests.measure.test_explosion import make_trace


def windows_of(trace, request, layer, size):
    routed = trace.indices[trace.request_index == request][:, layer]
    return [set(routed[i : i + size].ravel().tolist()) for i in range(0, len(routed) - size + 1, size)]


def test_window_reuse_by_sets():
    trace = make_trace((14, 7, 3))
    for lookback in (1, 2):
        found = window_reuse(trace, window=2, lookback=lookback)
        for request in range(3):
            shared = needed = 0
            for layer in range(2):
                windows = windows_of(trace, request, layer, 2)
                for i in range(lookback, len(windows)):
                    shared += len(windows[i] & set.union(*windows[i - lookback : i]))
                    needed += len(windows[i])
            assert (found.found[request], found.needed[request]) == (shared, needed)


def test_reuse_distances_by_search():
    trace = make_trace((9, 12))
    distances = reuse_distances(trace)
    for request in range(2):
        rows = np.flatnonzero(trace.request_index == request)
        for t, row in enumerate(rows):
            for layer in range(2):
                for slot, expert in enumerate(trace.indices[row, layer]):
                    uses = [s for s in range(t) if expert in trace.indices[rows[s], layer]]
                    assert distances[row, layer, slot] == (t - uses[-1] if uses else 0)


@pytest.mark.parametrize("slots", [1, 4, 12, 99])
@pytest.mark.parametrize("window", [1, 3])
def test_lru_residents_equal_an_lru_cache(slots, window):
    """An ordered dictionary per layer sees the experts token by token, in ascending order."""
    trace = make_trace((13, 8), sticky=0.3)
    found = lru_residents(trace, window, slots)
    for request in range(2):
        hits = needed = 0
        for layer in range(2):
            cache = OrderedDict()
            routed = trace.indices[trace.request_index == request][:, layer]
            for i in range(0, len(routed) - window + 1, window):
                wanted = set(routed[i : i + window].ravel().tolist())
                if i > 0:
                    hits += len(wanted & cache.keys())
                    needed += len(wanted)
                for token in routed[i : i + window]:
                    for expert in sorted(token.tolist()):
                        cache[expert] = None
                        cache.move_to_end(expert)
                while len(cache) > slots:
                    cache.popitem(last=False)
        assert (found.found[request], found.needed[request]) == (hits, needed)


def test_shares_grow_with_slots_and_lookback():
    trace = make_trace((60, 50, 40), sticky=0.3)
    by_slots = [float(lru_residents(trace, 4, slots).interval().estimate) for slots in (1, 3, 6, 12)]
    assert by_slots == sorted(by_slots) and by_slots[0] < by_slots[-1] <= 1
    one, two = (window_reuse(trace, 4, lookback).interval() for lookback in (1, 2))
    assert one.estimate < two.estimate and one.low <= one.estimate <= one.high


def test_uniform_reuse_is_what_a_random_router_shows():
    trace = make_trace((3000,), experts=16, top_k=2)
    distances = reuse_distances(trace)
    for tokens in (1, 4, 16):
        share = ((distances > 0) & (distances <= tokens)).mean()
        assert share == pytest.approx(uniform_reuse(16, 2, tokens), abs=0.02)


def test_a_request_without_tokens_counts_nothing():
    trace = make_trace((10, 10))
    kept = trace.request_index == 1
    fields = ("request_index", "position", "phase", "token_id", "indices", "weights", "scores")
    trace = replace(trace, **{name: getattr(trace, name)[kept] for name in fields})
    assert window_reuse(trace, 2).needed[0] == lru_residents(trace, 2, 4).needed[0] == 0
    assert window_reuse(trace, 2).needed[1] > 0


def test_lru_held_keeps_the_newest_and_nothing_unused():
    used = np.array([[[True, True, False, False]], [[False, True, False, False]], [[False, False, True, False]]])
    held = lru_held(last_uses(used), slots=2)  # [T + 1, L, E]
    assert held[:, 0].tolist() == [
        [False, False, False, False], [True, True, False, False], [True, True, False, False], [False, True, True, False],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="0 slots"):
        lru_held(last_uses(used), slots=0)
