import dataclasses

import numpy as np
import pytest

from specter_lab.errors import UserError
from specter_lab.measure.fidelity import DEFINITIONS, compare, mean_interval, per_layer, per_request
from specter_lab.measure.trace import Origin, Trace

REQUEST_INDEX = np.repeat(np.arange(4), (3, 10, 1, 6)).astype(np.int32)


def make_trace(indices, weights, scores, num_experts, request_index=REQUEST_INDEX) -> Trace:
    tokens, layers = indices.shape[:2]
    return Trace(
        Origin("m", "d"), "teacher-forced", num_experts, tuple(range(layers)), ("a", "b", "c", "d"), request_index,
        np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.uint8), np.arange(tokens, dtype=np.int32),
        indices.astype(np.uint8), weights.astype(np.float32), scores.astype(np.float32),
    )  # fmt: skip


def random_trace(seed, num_experts=8, top_k=3, layers=2) -> Trace:
    """Slots in random order, and weights that do not follow the scores."""
    rng = np.random.default_rng(seed)
    shape = (len(REQUEST_INDEX), layers, num_experts)
    indices = rng.random(shape).argsort(axis=-1)[..., :top_k]
    return make_trace(indices, rng.random(indices.shape), rng.standard_normal(indices.shape), num_experts)


def loop_oracle(a: Trace, b: Trace, token: int, layer: int) -> dict[str, float]:
    """One instance, by sets and dictionaries."""

    def ranked(trace):
        pairs = sorted(zip(trace.scores[token, layer], trace.indices[token, layer]), reverse=True)
        return [int(expert) for _, expert in pairs]

    def weight_of(trace):
        return {int(e): float(w) for e, w in zip(trace.indices[token, layer], trace.weights[token, layer])}

    ranked_a, ranked_b, w_a, w_b = ranked(a), ranked(b), weight_of(a), weight_of(b)
    both, either = set(ranked_a) & set(ranked_b), set(ranked_a) | set(ranked_b)
    return {
        "ordered_match": float(ranked_a == ranked_b),
        "set_match": float(set(ranked_a) == set(ranked_b)),
        "overlap": len(both) / len(ranked_a),
        "jaccard": len(both) / len(either),
        "weighted_overlap": sum(min(w_a[e], w_b[e]) for e in both) / max(sum(w_a.values()), sum(w_b.values())),
        "top1_match": float(ranked_a[0] == ranked_b[0]),
    }


@pytest.mark.parametrize("num_experts, top_k", ((8, 3), (4, 3), (5, 1), (64, 6)))
def test_equals_the_loop_oracle(num_experts, top_k):
    a, b = random_trace(0, num_experts, top_k), random_trace(1, num_experts, top_k)
    result = compare(a, b)
    for token in range(a.num_tokens):
        for layer in range(2):
            for name, expected in loop_oracle(a, b, token, layer).items():
                assert getattr(result, name)[token, layer] == pytest.approx(expected, abs=1e-6), name


def test_one_instance_by_hand():
    """A ranks 5 > 1 > 2 > 7 with weights .4 .3 .2 .1; B ranks 5 > 2 > 9 > 1 with weights .5 .2 .1 .1."""
    one = np.zeros(1, np.int32)
    a = make_trace(np.array([[[1, 5, 7, 2]]]), np.array([[[0.3, 0.4, 0.1, 0.2]]]), np.array([[[3, 4, 1, 2]]]), 16, one)
    b = make_trace(np.array([[[5, 2, 9, 1]]]), np.array([[[0.5, 0.2, 0.1, 0.1]]]), np.array([[[9, 8, 7, 6]]]), 16, one)
    expected = dict(  # shared: 5 with .4, 1 with .1, 2 with .2; either sum of weights is at most 1
        ordered_match=0, set_match=0, overlap=3 / 4, jaccard=3 / 5, weighted_overlap=0.4 + 0.1 + 0.2, top1_match=1
    )
    result = compare(a, b)
    assert {name: float(getattr(result, name)[0, 0]) for name in DEFINITIONS} == pytest.approx(expected)


def test_same_set_in_another_order_is_a_set_match_only():
    a = random_trace(0)
    b = dataclasses.replace(a, scores=-a.scores)
    result = compare(a, b)
    assert (result.set_match == 1).all() and (result.weighted_overlap > 0.999).all() and (result.jaccard == 1).all()
    assert (result.ordered_match == 0).all() and (result.top1_match == 0).all()


def test_slot_order_does_not_matter():
    a = random_trace(0)
    b = dataclasses.replace(a, indices=a.indices[..., ::-1], weights=a.weights[..., ::-1], scores=a.scores[..., ::-1])
    result = compare(a, b)
    assert all((getattr(result, name) == 1).all() for name in DEFINITIONS)


def test_aggregates():
    result = compare(random_trace(0), random_trace(1))
    values = result.overlap
    assert per_layer(values) == pytest.approx([values[:, 0].mean(), values[:, 1].mean()])
    assert per_request(values, REQUEST_INDEX) == pytest.approx([values[REQUEST_INDEX == r].mean() for r in range(4)])
    interval = mean_interval(values, REQUEST_INDEX)
    assert interval.estimate == pytest.approx(values.mean())
    assert interval.n_requests == 4 and interval.low < interval.estimate < interval.high


def test_traces_of_other_tokens_or_models_are_refused():
    a = random_trace(0)
    with pytest.raises(UserError, match="different tokens"):
        compare(a, dataclasses.replace(a, token_id=a.token_id + 1))
    with pytest.raises(UserError, match="different tokens"):
        compare(a, dataclasses.replace(a, request_ids=("a", "b", "c", "e")))
    with pytest.raises(UserError, match="differ in layers, experts or top-k"):
        compare(a, random_trace(0, num_experts=9))
