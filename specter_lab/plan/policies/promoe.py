"""ProMoE: a learned predictor says which experts the next layer will use, and they are copied meanwhile.

Learned from other requests: P(expert e' in layer l + 1 | expert e in layer l), of the same token. The predicted uses of
layer l + 1 are the sums over the tokens' experts in layer l; the tokens' top-k are copied behind layer l's own misses, two at
most on their way. Simplified: ProMoE trains a small network on hidden states and looks several layers ahead; a copy once
begun is not interrupted here. Its memory of a draft that it does not have becomes slots.
"""

from __future__ import annotations

import numpy as np

from specter_lab.compiled import compiled
from specter_lab.plan.policy import Policy, Prefetcher, Scene, slots_without_draft
from specter_lab.plan.serve import NOTHING_AHEAD, Ahead, Needs


class NextLayer(Prefetcher):
    """Copies what tables over pairs of neighbouring layers predict."""

    def __init__(self, scene: Scene) -> None:
        self._tables = None if scene.history is None else next_layer(scene.history.decoding(), scene.num_experts)

    def ahead(self, needs: Needs) -> Ahead:
        return NOTHING_AHEAD if self._tables is None else Ahead(*predicted(self._tables, needs.token_experts))


def next_layer(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """P(row's expert is followed by column's in the next layer) from experts [R, N, L, k]: [L - 1, E, E]."""
    layers, top_k = experts.shape[2:]
    now, following = experts[:, :, :-1].reshape(-1, layers - 1, top_k), experts[:, :, 1:].reshape(-1, layers - 1, top_k)
    pairs = (now[..., :, None] * num_experts + following[..., None, :]).swapaxes(0, 1).reshape(layers - 1, -1)
    counts = np.stack([np.bincount(of_layer, minlength=num_experts**2) for of_layer in pairs])
    counts = counts.reshape(layers - 1, num_experts, num_experts).astype(np.float64)
    return counts * top_k / np.maximum(counts.sum(axis=2, keepdims=True), 1)


@compiled
def predicted(tables: np.ndarray, token_experts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every layer but the first the k experts with the largest sums over the tokens [L, T, k]: rows of `Ahead`."""
    layers, tokens, top_k = token_experts.shape
    known, experts = np.empty((layers - 1) * top_k, np.int64), np.empty((layers - 1) * top_k, np.int64)
    scores = np.empty(tables.shape[2])
    for layer in range(layers - 1):
        scores[:] = 0
        for token in range(tokens):
            for place in range(top_k):
                scores += tables[layer, token_experts[layer, token, place]]
        for place in range(top_k):
            best = scores.argmax()
            known[layer * top_k + place], experts[layer * top_k + place] = layer, best
            scores[best] = -1
    return known, known + 1, experts


POLICY = Policy(
    "promoe", "ProMoE, one layer ahead", "ProMoE", draft=None, slots=slots_without_draft, prefetch=NextLayer
)
