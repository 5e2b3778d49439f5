import numpy as np
import pytest

from specter_lab.errors import UserError
from specter_lab.measure.bootstrap import ratio_interval, resample_counts


def test_estimate_is_the_ratio_of_sums_and_n_is_reported():
    interval = ratio_interval(np.array([1.0, 30.0]), np.array([2, 40]))
    assert interval.estimate == pytest.approx(31 / 42)
    assert (interval.n_requests, interval.confidence) == (2, 0.95)
    assert (interval.low, interval.high) == pytest.approx((1 / 2, 30 / 40))


def test_equals_resampling_one_request_at_a_time():
    rng = np.random.default_rng(1)
    tokens = rng.integers(20, 200, 30)
    hits = rng.binomial(tokens, rng.beta(8, 2, 30)).astype(float)
    drawn = [rng.integers(0, 30, 30) for _ in range(4000)]
    low, high = np.quantile([hits[d].sum() / tokens[d].sum() for d in drawn], (0.05, 0.95))
    interval = ratio_interval(hits, tokens, resamples=4000, confidence=0.9)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.003)


def test_covers_the_truth_when_tokens_of_a_request_hang_together():
    """200 experiments of 60 requests; an interval over single tokens would cover the true 0.8 in about half of them."""
    rng = np.random.default_rng(2)
    covered = 0
    for seed in range(200):
        hits = rng.binomial(100, rng.beta(8, 2, 60)).astype(float)
        interval = ratio_interval(hits, np.full(60, 100), resamples=500, seed=seed)
        covered += interval.low <= 0.8 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


def test_columns_are_independent_ratios():
    rng = np.random.default_rng(3)
    hits, tokens = rng.random((20, 3)), rng.integers(1, 9, (20, 3))
    together = ratio_interval(hits, tokens, seed=5)
    for column in range(3):
        single = ratio_interval(hits[:, column], tokens[:, column], seed=5)
        for field in ("estimate", "low", "high"):
            assert getattr(together, field)[column] == pytest.approx(float(getattr(single, field)))


def test_seed_decides():
    np.testing.assert_array_equal(resample_counts(9, 50, seed=4), resample_counts(9, 50, seed=4))
    assert (resample_counts(9, 50, seed=4) != resample_counts(9, 50, seed=5)).any()
    assert (resample_counts(9, 50, seed=4).sum(axis=1) == 9).all()


def test_one_request_is_not_enough():
    with pytest.raises(UserError, match="at least 2"):
        ratio_interval(np.array([1.0]), np.array([2]))
