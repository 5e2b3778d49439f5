import numpy as np
import pytest

from specter_lab.errors import UserError
from specter_lab.measure.explosion import distinct_experts, independent_routing, uniform_routing, used_experts
from specter_lab.measure.trace import PREFILL, Origin, Trace


def make_trace(lengths, layers=2, experts=12, top_k=3, seed=0, sticky=0.0):
    """Random routing; with probability `sticky` a token routes as the one before it."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    indices = rng.random((tokens, layers, experts)).argsort(axis=-1)[..., :top_k].astype(np.uint8)
    for t in range(1, tokens):
        if rng.random() < sticky:
            indices[t] = indices[t - 1]
    return Trace(
        Origin("random", "0"), "teacher-forced", experts, tuple(range(layers)), tuple(f"r{i}" for i in range(len(lengths))),
        np.repeat(np.arange(len(lengths)), lengths), np.concatenate([np.arange(n) for n in lengths]),
        np.full(tokens, PREFILL), np.zeros(tokens, dtype=np.int32), indices, np.ones(indices.shape, np.float32),
        np.ones(indices.shape, np.float32),
    )  # fmt: skip


def test_counts_are_those_of_sets():
    """Window by window with Python sets; windows never cross a request."""
    trace = make_trace((9, 4, 6))
    counted = distinct_experts(trace, max_window=5)
    for request in range(3):
        routed = trace.indices[trace.request_index == request]
        for window in range(1, 6):
            starts = range(max(0, len(routed) - window + 1))
            assert counted.windows[window - 1, request] == len(starts)
            for layer in range(2):
                sizes = [len(set(routed[s : s + window, layer].ravel())) for s in starts]
                assert counted.distinct[window - 1, request, layer] == sum(sizes)


def test_mean_and_interval():
    trace = make_trace((40, 30, 50, 45))
    counted = distinct_experts(trace, max_window=8)
    np.testing.assert_array_equal(counted.mean(1), [3, 3])  # one token uses k experts
    found = counted.interval(8, seed=1)
    assert found.estimate == pytest.approx(counted.mean(8).mean())
    assert found.low <= found.estimate <= found.high and found.n_requests == 4
    some = counted.interval(8, np.array([0, 2]))
    assert some.estimate == pytest.approx(counted.mean(8, np.array([0, 2])).mean()) and some.n_requests == 2


def test_short_requests_have_no_windows():
    counted = distinct_experts(make_trace((3, 20, 20)), max_window=8)
    assert counted.windows[7, 0] == 0
    assert counted.interval(8).n_requests == 2
    with pytest.raises(UserError, match="no request of this trace has 32 tokens .the longest has 20."):
        distinct_experts(make_trace((3, 20)))


def test_a_uniform_router_needs_what_the_formula_says():
    trace = make_trace((4000,), experts=16, top_k=2)
    counted = distinct_experts(trace, max_window=16)
    for window in (1, 4, 16):
        assert counted.mean(window).mean() == pytest.approx(uniform_routing(16, 2, window), rel=0.02)
        assert independent_routing(trace, window) == pytest.approx(uniform_routing(16, 2, window), rel=0.02)


@pytest.mark.parametrize("experts, top_k, needed", [(64, 6, 50.8), (60, 4, 40.1), (16, 2, 14.1)])
def test_uniform_line_of_the_papers_models(experts, top_k, needed):
    assert uniform_routing(experts, top_k, 16) == pytest.approx(needed, abs=0.05)


def test_locality_needs_fewer_experts_than_frequencies_alone():
    """Sticky routing leaves the frequencies as they are; only the order of tokens saves experts."""
    trace = make_trace((3000,), sticky=0.6)
    measured = distinct_experts(trace, max_window=8).mean(8).mean()
    assert measured < 0.8 * independent_routing(trace, 8)
    assert independent_routing(trace, 8) == pytest.approx(uniform_routing(12, 3, 8), rel=0.05)


def test_used_experts():
    used = used_experts(make_trace((5,)))
    assert used.shape == (5, 2, 12) and (used.sum(axis=-1) == 3).all()
