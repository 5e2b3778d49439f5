"""Which experts of a layer are in GPU memory: the slot state machine that simulator and engine share.

    free --reserve--> loading --(copy ends)--> ready --reserve by another expert--> loading ...

A slot holds one expert from the moment its copy is asked for; `ready_ms` is when the copy ends (infinite until that is
known). A pinned expert (in use, or planned for the coming verification) is never evicted. Host copies are immutable, so
nothing is ever written back.

Victims come from the head of one linked list per layer. What differs between policies is where an expert is linked: LRU at the
tail when it is used, FIFO at the tail when it comes, LFU and SCORED by a score (uses so far, or whatever the policy says). A
pinned expert that reaches the head is set aside once, and goes back to the head (or where its score belongs) when released.

What it costs, with S slots in the layer:

    choosing a victim       O(1) in every order, beside one step for each pinned expert that is set aside on the way
    linking, LRU and FIFO   O(1): at the tail
    linking, LFU, SCORED    O(S) at worst: a walk from the tail (`use`, `reserve`), or from the head (`release`), to the score's place
    rescore                 O(S) when scores change little, O(S^2) at worst: an insertion sort
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specter_lab.compiled import compiled

LRU, FIFO, LFU, SCORED = range(4)
ABSENT, NONE = -1, -1


class Slots(NamedTuple):
    """The expert slots of L layers, S in the largest. Arrays are changed in place by the functions below."""

    order: int  # LRU, FIFO, LFU or SCORED
    count: np.ndarray  # [L] slots
    slot_of: np.ndarray  # [L, E] slot of an expert, loading or ready; or ABSENT
    expert_in: np.ndarray  # [L, S] expert in a slot, or ABSENT
    filled: np.ndarray  # [L] slots that hold an expert
    ready_ms: np.ndarray  # [L, S] when the copy into the slot ends
    generation: np.ndarray  # [L, S] copies begun into the slot: tells a late event from a current one
    pinned: np.ndarray  # [L, E] bool
    aside: np.ndarray  # [L, E] bool, in the list of those set aside
    score: np.ndarray  # [L, E] small goes first; for LFU and SCORED
    before: np.ndarray  # [L, E + 2] linked lists; E is the head of the victims, E + 1 of those set aside
    after: np.ndarray  # [L, E + 2]


def new_slots(count: np.ndarray, num_experts: int, order: int = LRU) -> Slots:
    """Empty slots, `count` [L] of them per layer.

    Raises:
        ValueError: a layer without slots.
    """
    if count.min() < 1:
        raise ValueError(f"layer {int(count.argmin())} has {count.min()} slots; every layer needs 1")
    layers, most = len(count), int(count.max())
    heads = np.tile(np.arange(num_experts + 2), (layers, 1))  # every head its own neighbour: empty lists
    return Slots(
        order=order,
        count=count.astype(np.int64),
        slot_of=np.full((layers, num_experts), ABSENT),
        expert_in=np.full((layers, most), ABSENT),
        filled=np.zeros(layers, np.int64),
        ready_ms=np.full((layers, most), np.inf),
        generation=np.zeros((layers, most), np.int64),
        pinned=np.zeros((layers, num_experts), np.bool_),
        aside=np.zeros((layers, num_experts), np.bool_),
        score=np.zeros((layers, num_experts)),
        before=heads.copy(),
        after=heads.copy(),
    )


@compiled
def reserve(slots: Slots, layer: int, expert: int) -> int:
    """A slot for `expert`, which must be absent: a free one, or that of the first victim that is not pinned.

    Returns NONE when every resident is pinned. The caller begins the copy and sets `ready_ms`.
    """
    if slots.filled[layer] < slots.count[layer]:
        slot = slots.filled[layer]
        slots.filled[layer] += 1
    else:
        victim = _pop_victim(slots, layer)
        if victim == NONE:
            return NONE
        slot = slots.slot_of[layer, victim]
        slots.slot_of[layer, victim] = ABSENT
    slots.slot_of[layer, expert] = slot
    slots.expert_in[layer, slot] = expert
    slots.generation[layer, slot] += 1
    slots.ready_ms[layer, slot] = np.inf
    _link(slots, layer, expert)
    return slot


@compiled
def reserve_all(slots: Slots, layers: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """`reserve` for absent experts [n], in order: their slots [n], or NONE where every resident is pinned."""
    found = np.empty(len(layers), np.int64)
    for i in range(len(layers)):
        found[i] = reserve(slots, layers[i], experts[i])
    return found


@compiled
def use(slots: Slots, layer: int, expert: int) -> None:
    """Note that a forward pass uses a resident."""
    if slots.order == LFU:
        slots.score[layer, expert] += 1
    if slots.order == LRU or slots.order == LFU:
        _unlink(slots, layer, expert)
        _link(slots, layer, expert)


@compiled
def release(slots: Slots, layer: int, expert: int) -> None:
    """Drop the pin of an expert; one that was set aside is a victim again."""
    slots.pinned[layer, expert] = False
    if slots.aside[layer, expert]:
        _unlink(slots, layer, expert)
        head = place = slots.slot_of.shape[1]
        if slots.order == LFU or slots.order == SCORED:  # someone who came meanwhile may score less
            following = slots.after[layer, place]
            while following != head and slots.score[layer, following] < slots.score[layer, expert]:
                place, following = following, slots.after[layer, following]
        _link_after(slots, layer, expert, place)


@compiled
def release_all(slots: Slots, layer: int) -> None:
    """Drop all pins of a layer; those set aside go back where they were, in their old order."""
    num_experts = slots.slot_of.shape[1]
    slots.pinned[layer, :] = False
    while slots.before[layer, num_experts + 1] != num_experts + 1:
        release(slots, layer, slots.before[layer, num_experts + 1])


@compiled
def use_all(slots: Slots, used: np.ndarray) -> tuple[int, int]:
    """A pass has used these experts [L, T, k]: note it, drop all pins; returns distinct experts, and those in a slot."""
    needed = hits = 0
    for layer in range(len(used)):
        release_all(slots, layer)
        seen = np.zeros(slots.slot_of.shape[1], np.bool_)
        for token in range(used.shape[1]):
            for expert in used[layer, token]:
                if seen[expert]:
                    continue
                seen[expert] = True
                needed += 1
                if slots.slot_of[layer, expert] != ABSENT:
                    hits += 1
                    use(slots, layer, expert)
    return needed, hits


@compiled
def begin_layer(slots: Slots, layer: int, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A layer's tokens use these experts [T, k]: pins go from what was planned for it to what it needs.

    Returns the distinct experts that are in a slot, and those that are not.
    """
    release_all(slots, layer)
    for token in range(len(used)):
        for expert in used[token]:
            slots.pinned[layer, expert] = True
    needed = np.flatnonzero(slots.pinned[layer])
    there = slots.slot_of[layer][needed] != ABSENT
    return needed[there], needed[~there]


@compiled
def of_a_turn(slots: Slots, layer: int) -> int:
    """Slots whose experts compute while others are filled, where a layer needs more experts than it has slots: half of them."""
    return max(1, slots.count[layer] // 2)


@compiled
def end_uses(slots: Slots, layer: int, experts: np.ndarray) -> None:
    """Residents [n] have been computed: note it, drop their pins."""
    for expert in experts:
        use(slots, layer, expert)
        release(slots, layer, expert)


@compiled
def rescore(slots: Slots, score: np.ndarray) -> None:
    """Take over scores [L, E] and order every layer's victims by them (ties: as they were)."""
    slots.score[:] = score
    num_experts = slots.slot_of.shape[1]
    for layer in range(len(slots.count)):
        expert = slots.after[layer, num_experts]
        slots.before[layer, num_experts] = slots.after[layer, num_experts] = num_experts
        while expert != num_experts:  # insertion sort: the old order is nearly the new one
            following = slots.after[layer, expert]
            _link(slots, layer, expert)
            expert = following


@compiled
def _pop_victim(slots: Slots, layer: int) -> int:
    num_experts = slots.slot_of.shape[1]
    while True:
        expert = slots.after[layer, num_experts]
        if expert == num_experts:
            return NONE
        _unlink(slots, layer, expert)
        if not slots.pinned[layer, expert]:
            return expert
        _link_after(slots, layer, expert, slots.before[layer, num_experts + 1])
        slots.aside[layer, expert] = True


@compiled
def _link(slots: Slots, layer: int, expert: int) -> None:
    """Put an expert among the victims: at the tail, or behind everyone whose score is not larger."""
    num_experts = slots.slot_of.shape[1]
    place = slots.before[layer, num_experts]
    if slots.order == LFU or slots.order == SCORED:
        while place != num_experts and slots.score[layer, place] > slots.score[layer, expert]:
            place = slots.before[layer, place]
    _link_after(slots, layer, expert, place)


@compiled
def _link_after(slots: Slots, layer: int, expert: int, place: int) -> None:
    following = slots.after[layer, place]
    slots.after[layer, place], slots.before[layer, expert] = expert, place
    slots.after[layer, expert], slots.before[layer, following] = following, expert


@compiled
def _unlink(slots: Slots, layer: int, expert: int) -> None:
    before, after = slots.before[layer, expert], slots.after[layer, expert]
    slots.after[layer, before], slots.before[layer, after] = after, before
    slots.aside[layer, expert] = False
