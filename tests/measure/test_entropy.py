import numpy as np
import pytest

from specter_lab.measure.entropy import activation_counts, layer_entropy, normalized_entropy, uniform_router_entropy
from specter_lab.measure.trace import Origin, Trace


def make_trace(indices: np.ndarray, request_index: np.ndarray, num_experts: int) -> Trace:
    tokens, layers = indices.shape[:2]
    per_token, per_slot = np.zeros(tokens, np.int32), np.zeros(indices.shape, np.float32)
    ids = tuple(map(str, range(request_index.max() + 1)))
    return Trace(
        Origin("m", "d"), "teacher-forced", num_experts, tuple(range(layers)), ids, request_index.astype(np.int32),
        per_token, per_token.astype(np.uint8), per_token, indices.astype(np.uint8), per_slot, per_slot,
    )  # fmt: skip


def route(rng, preference: np.ndarray, top_k: int) -> np.ndarray:
    """Top-k of log preference [..., E] plus Gumbel noise: k different experts [..., k]."""
    return (np.log(preference) + rng.gumbel(size=preference.shape)).argsort(axis=-1)[..., -top_k:]


def test_counts_equal_a_loop():
    rng = np.random.default_rng(0)
    trace = make_trace(rng.integers(0, 7, (30, 3, 2)), rng.integers(0, 4, 30), 7)
    expected = np.zeros((len(trace.request_ids), 3, 7), int)
    for token in range(30):
        for layer in range(3):
            for expert in trace.indices[token, layer]:
                expected[trace.request_index[token], layer, expert] += 1
    np.testing.assert_array_equal(activation_counts(trace), expected)


def test_entropy_of_known_shares():
    assert normalized_entropy(np.array([5, 5, 5, 5])) == pytest.approx(1)
    assert normalized_entropy(np.array([9, 0, 0, 0])) == 0
    assert normalized_entropy(np.array([[1, 1, 0, 0], [1, 1, 2, 0]])) == pytest.approx([0.5, 0.75])


@pytest.mark.parametrize("num_experts, top_k", ((60, 4), (16, 2), (64, 6)))
def test_uniform_reference_equals_simulation(num_experts, top_k):
    rng = np.random.default_rng(0)
    picks = route(rng, np.ones((300, 200, num_experts)), top_k)  # 300 simulations of 200 tokens
    simulated = [normalized_entropy(np.bincount(p.ravel(), minlength=num_experts)) for p in picks]
    shortfall = 1 - uniform_router_entropy(200, num_experts, top_k)
    assert shortfall == pytest.approx(1 - np.mean(simulated), rel=0.1)


@pytest.mark.parametrize("skew", (0.0, 0.7))
def test_interval_covers_the_entropy_of_endless_text(skew):
    """Requests differ in their favourite experts, so the plug-in entropy and its percentile interval lie too low."""
    rng = np.random.default_rng(1)
    experts, requests, tokens, runs = 16, 40, 30, 60
    base = np.exp(skew * np.linspace(-1, 1, experts))
    endless = route(rng, np.repeat(base * rng.dirichlet(np.full(experts, 5.0), 40_000), 5, axis=0), 2)
    truth = normalized_entropy(np.bincount(endless.ravel()))
    covered = 0
    for run in range(runs):
        favourites = base * rng.dirichlet(np.full(experts, 5.0), requests)
        picks = route(rng, np.repeat(favourites, tokens, axis=0), 2)[:, None]
        trace = make_trace(picks, np.repeat(np.arange(requests), tokens), experts)
        interval = layer_entropy(trace, resamples=300, seed=run)
        covered += interval.low[0] <= truth <= interval.high[0]
    assert covered / runs >= 0.85
    assert interval.n_requests == requests
