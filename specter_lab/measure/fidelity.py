"""How alike two models route: every definition of "match" in use, side by side and always named.

For one token in one layer (an *instance*), with A and B the sets of k experts the two models used and w their weights:

    ordered_match     1 when the experts, ordered by router score, are the same in every place
    set_match         1 when A = B
    overlap           |A and B| / k
    jaccard           |A and B| / |A or B|
    weighted_overlap  sum over experts in both of min(w_A, w_B), divided by max(sum w_A, sum w_B): the share of the
                      routing weight that both models give to the same experts; equals overlap when weights are equal
    top1_match        1 when the expert with the highest score is the same

The order is that of the router scores before softmax, not of the slots: DeepSeek's router returns its top-k unsorted,
and Phi's sparsemixer weights do not fall with the score.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specter_lab.errors import UserError
from specter_lab.measure.bootstrap import Interval, ratio_interval
from specter_lab.measure.trace import Trace

DEFINITIONS = ("ordered_match", "set_match", "overlap", "jaccard", "weighted_overlap", "top1_match")


@dataclass(frozen=True)
class Fidelity:
    """Per-instance match of two traces over the same T tokens and L layers; every value lies in [0, 1]."""

    layers: tuple[int, ...]  # [L] decoder layer numbers
    request_index: np.ndarray  # [T]
    ordered_match: np.ndarray  # [T, L] float32, as are the others
    set_match: np.ndarray
    overlap: np.ndarray
    jaccard: np.ndarray
    weighted_overlap: np.ndarray
    top1_match: np.ndarray


def compare(reference: Trace, other: Trace) -> Fidelity:
    """All match definitions between two traces.

    Raises:
        UserError: the traces do not cover the same tokens and layers, or differ in experts or top-k.
    """
    _check_comparable(reference, other)
    top_k = reference.top_k
    a, weights_a = by_score(reference)  # [T, L, k] each
    b, weights_b = by_score(other)
    in_both = np.zeros(a.shape, dtype=bool)  # [T, L, k]: is A's expert in B as well?
    partner = np.zeros(a.shape, dtype=np.float32)  # [T, L, k]: B's weight of A's expert, 0 when B does not use it
    for slot in range(top_k):
        same = a == b[..., slot : slot + 1]
        in_both |= same
        partner += same * weights_b[..., slot : slot + 1]
    shared = in_both.sum(axis=-1, dtype=np.float32)  # [T, L]
    mass = np.maximum(weights_a.sum(axis=-1), weights_b.sum(axis=-1))  # [T, L]
    return Fidelity(
        layers=reference.layers,
        request_index=reference.request_index,
        ordered_match=(a == b).all(axis=-1).astype(np.float32),
        set_match=(shared == top_k).astype(np.float32),
        overlap=shared / top_k,
        jaccard=shared / (2 * top_k - shared),
        weighted_overlap=np.minimum(weights_a, partner).sum(axis=-1) / mass,
        top1_match=(a[..., 0] == b[..., 0]).astype(np.float32),
    )


def by_score(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Experts and weights [T, L, k] of every instance, highest router score first."""
    order = np.argsort(-trace.scores, axis=-1, kind="stable")
    return np.take_along_axis(trace.indices, order, axis=-1), np.take_along_axis(trace.weights, order, axis=-1)


def per_layer(values: np.ndarray) -> np.ndarray:
    """Mean over tokens: instance values [T, L] -> [L]."""
    return values.mean(axis=0, dtype=np.float64)


def per_request(values: np.ndarray, request_index: np.ndarray) -> np.ndarray:
    """Mean over each request's tokens and all layers: [T, L] -> [R], requests without tokens left out."""
    instances, totals = _request_totals(values, request_index)
    return totals / instances


def mean_interval(
    values: np.ndarray, request_index: np.ndarray, *, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Mean over all instances [T, L] with a bootstrap interval over requests."""
    instances, totals = _request_totals(values, request_index)
    return ratio_interval(totals, instances, resamples=resamples, confidence=confidence, seed=seed)


def _request_totals(values: np.ndarray, request_index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Per request with tokens: number of instances [R] and sum of their values [R]."""
    tokens = np.bincount(request_index)
    totals = np.bincount(request_index, weights=values.sum(axis=1, dtype=np.float64))
    return tokens[tokens > 0] * values.shape[1], totals[tokens > 0]


def _check_comparable(a: Trace, b: Trace) -> None:
    if (a.layers, a.num_experts, a.top_k) != (b.layers, b.num_experts, b.top_k):
        raise UserError(f"traces of {a.origin.model} and {b.origin.model} differ in layers, experts or top-k: "
                        f"compare models of the same shape")  # fmt: skip
    fields = ("request_index", "position", "token_id")
    if a.request_ids != b.request_ids or any(not np.array_equal(getattr(a, f), getattr(b, f)) for f in fields):
        raise UserError(f"the traces '{a.origin.quantizer}' and '{b.origin.quantizer}' of {a.origin.model} cover "
                        f"different tokens: capture both from the same requests")  # fmt: skip
