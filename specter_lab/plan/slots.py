"""Expert slots where they save most: layers differ in what another slot is worth to them.

LRU with c + 1 slots keeps all that it keeps with c, so one replay of other requests gives the hits at every number of slots
(stack distances, Mattson et al. 1970): an expert that is the d-th most recently used of its layer is found from d slots on. The
division with the most hits is found exactly, by dynamic programming over layers and slots.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specter_lab.compiled import compiled
from specter_lab.plan.bounds import passes_of
from specter_lab.plan.policy import Scene

Rule = Callable[[Scene], np.ndarray]  # a policy's `slots`: [L]


def uneven(equal: Rule, *, drafts: bool) -> Rule:
    """As many slots in all as `equal` gives, divided by what they were worth to the other requests that the scene knows.

    Args:
        equal: how many there are; where the scene knows no other requests, they stay as they are.
        drafts: passes are windows of the scene's depth, else tokens one by one.
    """

    def divided(scene: Scene) -> np.ndarray:
        count = equal(scene)
        if scene.history is None or count.min() < 1:
            return count
        everyone, positions = range(scene.history.requests), scene.history.windows.positions
        passes = passes_of(scene.history, everyone, positions, depth=scene.depth if drafts else 0)
        return divide(lru_hits(passes.used), int(count.sum()))

    return divided


@compiled
def lru_hits(used: np.ndarray) -> np.ndarray:
    """Experts found by LRU with c = 0 .. E slots in passes that use these [P, L, E] bool, slots empty at first: [L, E + 1]."""
    passes, layers, experts = used.shape
    found = np.zeros((layers, experts + 1), np.int64)  # at the place of the list
    for layer in range(layers):
        recent, length = np.empty(experts, np.int64), 0  # most recent first
        for n in range(passes):
            kept, count = np.empty(experts, np.int64), 0
            for place in range(length):
                if used[n, layer, recent[place]]:
                    found[layer, place + 1] += 1
                else:
                    kept[count] = recent[place]
                    count += 1
            length = 0
            for expert in range(experts):
                if used[n, layer, expert]:
                    recent[length] = expert
                    length += 1
            recent[length : length + count] = kept[:count]
            length += count
        found[layer] = np.cumsum(found[layer])
    return found


def divide(hits: np.ndarray, total: int) -> np.ndarray:
    """Slots [L], at least 1 each, `total` in all, with the largest sum of hits [L, E + 1]; of equals the fewest early."""
    layers, most = hits.shape[0], hits.shape[1] - 1
    best = np.where(np.arange(total + 1) == 0, 0.0, -np.inf)  # [total + 1] with the layers so far
    choices = []
    for of_layer in hits:
        options = np.full((most + 1, total + 1), -np.inf)  # [c, total + 1] hits when this layer takes c
        for c in range(1, min(most, total) + 1):
            options[c, c:] = best[: total + 1 - c] + of_layer[c]
        choices.append(options.argmax(axis=0))
        best = options.max(axis=0)
    slots = np.empty(layers, np.int64)
    for layer in reversed(range(layers)):
        slots[layer] = choices[layer][total]
        total -= slots[layer]
    return slots
