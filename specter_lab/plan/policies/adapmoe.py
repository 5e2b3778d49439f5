"""AdapMoE's uneven cache: slots are divided over the layers so that LRU hits most often (AdapMoE, section on caching).

The curve "hits of layer l with c slots" is measured on other requests, by LRU stack distances; the division that maximises
the sum is found exactly, by dynamic programming over layers and slots. Simplified: AdapMoE's model of hit rates is
replaced by measured curves; its adaptive number of experts per token (lossy) and its prefetching by the next layer's
router are left out. Memory of the draft that it does not have becomes slots.
"""

from __future__ import annotations

import numpy as np

from specter_lab.compiled import compiled
from specter_lab.plan.policy import Policy, Scene, slots_without_draft


def uneven_slots(scene: Scene) -> np.ndarray:
    """As many slots in all as `slots_without_draft`, divided by the hit curves of `scene.history`: [L]."""
    equal = slots_without_draft(scene)
    if scene.history is None or equal.min() < 1:
        return equal
    curves = np.array([lru_hits(of_request, scene.num_experts) for of_request in scene.history.decoding()])
    return divide(curves.sum(axis=0), int(equal.sum()))


@compiled
def lru_hits(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """Hits of LRU with c slots for c = 0 .. E, from passes [N, L, k]: [L, E + 1]. Every request starts with empty slots."""
    passes, layers, top_k = experts.shape
    at_distance = np.zeros((layers, num_experts + 1), np.int64)  # uses of the expert at that place of the list
    for layer in range(layers):
        recent, length = np.empty(num_experts + top_k, np.int64), 0  # most recent first
        for n in range(passes):
            for place in range(length):
                for i in range(top_k):
                    if experts[n, layer, i] == recent[place]:
                        at_distance[layer, place + 1] += 1
            kept = recent[:length].copy()
            recent[:top_k] = experts[n, layer]
            length = top_k
            for expert in kept:
                if not (experts[n, layer] == expert).any():
                    recent[length] = expert
                    length += 1
    for layer in range(layers):
        at_distance[layer] = np.cumsum(at_distance[layer])
    return at_distance


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


POLICY = Policy("adapmoe", "AdapMoE, uneven slots", "AdapMoE", draft=None, slots=uneven_slots)
