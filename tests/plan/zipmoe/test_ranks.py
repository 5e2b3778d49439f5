"""The rank model against enumeration and Monte Carlo."""

from itertools import combinations

import numpy as np
import pytest

from specter_lab.plan.zipmoe import ranks


def enumerated(weights, k):
    """Inclusion probabilities and the law of hits in the first three, by listing all sets."""
    total, inside, law = 0.0, np.zeros(len(weights)), np.zeros(k + 1)
    for chosen in combinations(range(len(weights)), k):
        p = np.prod(weights[list(chosen)])
        total += p
        inside[list(chosen)] += p
        law[sum(c < 3 for c in chosen)] += p
    return inside / total, law / total


def test_conditional_bernoulli_against_all_sets():
    weights = np.array([3.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.05])
    inside, law = enumerated(weights, 3)
    assert np.allclose(ranks.conditional_inclusion(weights, 3), inside)
    assert np.allclose(ranks.conditional_law(weights, slice(0, 3), 3), law)
    assert inside.sum() == pytest.approx(3)


def test_weights_give_the_probabilities_back():
    pi = np.array([0.95, 0.8, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2])
    weights = ranks.bernoulli_weights(pi, 4)
    assert np.allclose(ranks.conditional_inclusion(weights, 4), pi, atol=1e-6)
    assert ranks.success_probabilities(weights, 4).sum() == pytest.approx(4)


def test_poisson_binomial_against_the_binomial_and_draws():
    assert np.allclose(ranks.poisson_binomial(np.full(4, 0.5), 4), np.array([1, 4, 6, 4, 1]) / 16)
    p = np.array([0.9, 0.5, 0.1])
    drawn = (np.random.default_rng(0).random((200_000, 3)) < p).sum(axis=1)
    assert np.allclose(ranks.poisson_binomial(p, 3), np.bincount(drawn, minlength=4) / len(drawn), atol=0.005)


def test_independent_draws_given_their_number_are_the_conditional_law():
    weights = np.array([3.0, 2.0, 1.0, 0.5, 0.2, 0.1])
    q = ranks.success_probabilities(weights, 2)
    inside, outside = ranks.poisson_binomial(q[:3], 2), ranks.poisson_binomial(q[3:], 2)
    law = inside * outside[::-1]
    assert np.allclose(law / law.sum(), ranks.conditional_law(weights, slice(0, 3), 2))


def test_inclusion_falls_and_sums_to_k():
    pi = ranks.inclusion(np.array([5, 100, 40, 60, 0, 1]), 2)
    assert (np.diff(pi) <= 1e-12).all() and pi.sum() == pytest.approx(2) and pi.max() <= 0.999
    steep = ranks.inclusion(np.array([1000, 1, 1, 1]), 2)  # 2 x share is more than 1
    assert steep[0] == pytest.approx(0.999) and steep.sum() == pytest.approx(2)


def test_ranks_follow_recent_use_and_start_from_the_prior():
    tracker = ranks.RankTracker(np.array([0.1, 0.6, 0.3]))
    assert tracker.ranks().tolist() == [2, 0, 1]
    tracker.observe(np.array([0]))
    assert tracker.ranks().tolist() == [0, 1, 2]
