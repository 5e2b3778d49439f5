"""Counts, plans and chunk boundaries of Specter's lookahead, by hand."""

import numpy as np

from specter_lab.plan.lookahead import Boundaries, Lookahead, plan_top
from specter_lab.plan.residency import ABSENT, new_slots, reserve


def loads(found):
    return list(zip(*(column.tolist() for column in found)))


def test_counts_merge_requests():
    lookahead = Lookahead(2, 4)
    lookahead.observe(np.array([[0, 1], [2, 3]]))
    lookahead.observe(np.array([[0, 2], [2, 3]]))
    assert lookahead.counts.tolist() == [[2, 1, 1, 0], [0, 0, 2, 2]]
    assert lookahead.full(np.array([3, 2])) and not lookahead.full(np.array([3, 3]))


def test_a_plan_is_the_most_counted_first_and_pins_them():
    slots = new_slots(np.array([2, 2]), 4)
    reserve(slots, 0, 1)
    slots.pinned[1, 3] = True  # of an older plan
    counts = np.array([[1, 3, 2, 0], [0, 2, 2, 0]], np.int32)
    assert loads(plan_top(counts, slots)) == [(0, 2), (1, 1), (1, 2)]  # expert 1 is there; ties: the lower number
    assert slots.pinned.tolist() == [[False, True, True, False], [False, True, True, False]]


def test_a_plan_asks_for_nothing_that_was_not_counted():
    slots = new_slots(np.array([3]), 4)
    assert loads(plan_top(np.zeros((1, 4), np.int32), slots)) == []
    assert (slots.slot_of == ABSENT).all() and not slots.pinned.any()


def test_boundaries_by_hand():
    """First at floor(0.2 K), at least 1; 24 MB at 12 GB/s take 2 ms, two steps of 1 ms; both estimates move by a quarter."""
    boundaries = Boundaries()
    assert [boundaries.first(depth) for depth in (1, 4, 5, 16)] == [1, 1, 1, 3]
    assert boundaries.after(3, 24e6) == 5 and boundaries.after(3, 0) == 4 and boundaries.after(3, 25e6) == 6
    boundaries.observe_step(5.0)
    assert boundaries.step_ms == 2.0
    boundaries.observe_copy(16e6, 1.0)
    assert boundaries.bandwidth_gb_s == 13.0
    boundaries.observe_copy(0, 0.0)
    assert boundaries.bandwidth_gb_s == 13.0
