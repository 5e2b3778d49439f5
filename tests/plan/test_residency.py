"""The slot state machine against an obviously right one, in random interleavings."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_lab.plan.residency import (
    ABSENT,
    FIFO,
    LFU,
    LRU,
    NONE,
    SCORED,
    new_slots,
    release,
    release_all,
    rescore,
    reserve,
    use,
)

EXPERTS = 6
ORDERS = (LRU, FIFO, LFU, SCORED)


@dataclass
class Model:
    """One layer as a list of residents, next victim first, the way a textbook would write it."""

    order: int
    count: int
    victims: list[int] = field(default_factory=list)  # residents that are not set aside
    aside: list[int] = field(default_factory=list)  # pinned ones that a victim search came across
    pinned: set[int] = field(default_factory=set)
    score: dict[int, float] = field(default_factory=lambda: dict.fromkeys(range(EXPERTS), 0.0))

    @property
    def residents(self):
        return set(self.victims) | set(self.aside)

    def _insert(self, expert):
        place = len(self.victims)
        if self.order in (LFU, SCORED):
            while place and self.score[self.victims[place - 1]] > self.score[expert]:
                place -= 1
        self.victims.insert(place, expert)

    def reserve(self, expert):
        """The victim, ABSENT when a slot was free, or NONE."""
        victim = ABSENT
        if len(self.residents) == self.count:
            while self.victims and self.victims[0] in self.pinned:
                self.aside.append(self.victims.pop(0))
            if not self.victims:
                return None
            victim = self.victims.pop(0)
        self._insert(expert)
        return victim

    def use(self, expert):
        if self.order == LFU:
            self.score[expert] += 1
        if self.order in (LRU, LFU):
            (self.aside if expert in self.aside else self.victims).remove(expert)
            self._insert(expert)

    def release(self, expert):
        self.pinned.discard(expert)
        if expert in self.aside:
            self.aside.remove(expert)
            scored = self.order in (LFU, SCORED)
            place = sum(self.score[e] < self.score[expert] for e in self.victims) if scored else 0
            self.victims.insert(place, expert)

    def release_all(self):
        for expert in self.aside[::-1]:
            self.release(expert)
        self.pinned = set()

    def rescore(self, scores):
        self.score = dict(enumerate(scores))
        old, self.victims = self.victims, []
        for expert in old:
            self._insert(expert)


def linked(slots, head):
    """A linked list from its head, walked both ways."""
    forward, at = [], slots.after[0, head]
    while at != head:
        forward.append(int(at))
        at = slots.after[0, at]
    backward, at = [], slots.before[0, head]
    while at != head:
        backward.append(int(at))
        at = slots.before[0, at]
    assert forward == backward[::-1]
    return forward


def check(slots, model):
    resident = {e for e in range(EXPERTS) if slots.slot_of[0, e] != ABSENT}
    assert resident == model.residents and len(resident) == slots.filled[0] <= slots.count[0]
    for expert in resident:
        assert slots.expert_in[0, slots.slot_of[0, expert]] == expert, "two experts claim one slot"
    assert linked(slots, EXPERTS) == model.victims
    assert linked(slots, EXPERTS + 1) == model.aside
    assert {e for e in range(EXPERTS) if slots.aside[0, e]} == set(model.aside)


STEPS = st.lists(
    st.tuples(st.sampled_from(["touch", "pin", "release", "release_all", "rescore"]), st.integers(0, EXPERTS - 1),
              st.lists(st.integers(0, 3), min_size=EXPERTS, max_size=EXPERTS)),
    max_size=60,
)  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=60)
@given(count=st.integers(1, EXPERTS), steps=STEPS)
def test_random_interleavings_equal_the_model(order, count, steps):
    slots, model = new_slots(np.array([count]), EXPERTS, order), Model(order, count)
    copies = 0
    for action, expert, scores in steps:
        if action == "touch" and expert in model.residents:
            use(slots, 0, expert)
            model.use(expert)
        elif action == "touch":
            before = {e: int(slots.slot_of[0, e]) for e in model.residents}
            pinned = set(model.pinned) & model.residents
            slot, victim = reserve(slots, 0, expert), model.reserve(expert)
            assert (slot == NONE) == (victim is None)
            if victim is not None:
                copies += 1
                assert slots.ready_ms[0, slot] == np.inf
                assert all(slots.slot_of[0, e] == before[e] for e in pinned), "an expert in use was evicted"
                if victim != ABSENT:
                    assert before[victim] == slot and slots.slot_of[0, victim] == ABSENT
        elif action == "pin":
            slots.pinned[0, expert] = True
            model.pinned.add(expert)
        elif action == "release":
            release(slots, 0, expert)
            model.release(expert)
        elif action == "release_all":
            release_all(slots, 0)
            model.release_all()
        elif order == SCORED:
            rescore(slots, np.array([scores], float))
            model.rescore(scores)
        check(slots, model)
        if order in (LFU, SCORED):
            scores_of = [model.score[e] for e in model.victims]
            assert scores_of == sorted(scores_of)
    assert slots.generation.sum() == copies


def test_generation_tells_a_late_event_from_a_current_one():
    slots = new_slots(np.array([1]), EXPERTS)
    slot = reserve(slots, 0, 3)
    asked_for = slots.generation[0, slot]
    assert reserve(slots, 0, 4) == slot
    assert slots.generation[0, slot] == asked_for + 1


def test_layers_do_not_touch_each_other():
    slots = new_slots(np.array([1, 2]), EXPERTS)
    for expert in range(3):
        reserve(slots, 1, expert)
    assert (slots.slot_of[0] == ABSENT).all() and slots.filled.tolist() == [0, 2]


def test_a_layer_without_slots_is_refused():
    with pytest.raises(ValueError, match="layer 1 has 0 slots; every layer needs 1"):
        new_slots(np.array([2, 0]), EXPERTS)
