import numpy as np
import pytest

from specter_lab.errors import UserError
from specter_lab.measure.acceptance import by_position, expected_accepted, measure, residency
from specter_lab.measure.speculate import Rounds


def rounds_of(accepted, request, depth, needed=None, predicted=None):
    accepted = np.asarray(accepted)
    none = np.zeros((len(accepted), 1, 4), dtype=bool)
    return Rounds(depth, np.asarray(request), np.zeros_like(accepted), accepted,
                  none if needed is None else needed, none if predicted is None else predicted)  # fmt: skip


def simulated(acceptance, depth, requests=60, rounds=50):
    """Rounds whose tokens pass with one chance, independently."""
    passed = np.random.default_rng(0).random((requests * rounds, depth)) < acceptance
    return rounds_of(passed.cumprod(axis=1).sum(axis=1), np.repeat(np.arange(requests), rounds), depth)


def test_counts_by_hand():
    found = measure(rounds_of([4, 0, 2, 4], [0, 0, 1, 1], depth=4))
    assert found.per_checked.estimate == pytest.approx(10 / 12)  # checked: 4, 1, 3, 4
    assert found.per_proposed.estimate == pytest.approx(10 / 16)
    assert found.tokens_per_round.estimate == pytest.approx(14 / 4)
    assert (found.n_rounds, found.per_checked.n_requests) == (4, 2)


@pytest.mark.parametrize("depth", [2, 8, 32])
def test_rounds_of_constant_acceptance_give_the_formula(depth):
    found = measure(simulated(0.9, depth))
    assert found.per_checked.low < 0.9 < found.per_checked.high
    assert found.tokens_per_round.low < 1 + expected_accepted(0.9, depth) < found.tokens_per_round.high


def test_the_papers_numbers():
    """Numbers worked out by hand from the paper's acceptance."""
    unbounded = expected_accepted(0.9663, None)
    assert unbounded == pytest.approx(28.7, abs=0.05)
    assert [round(expected_accepted(0.9663, k), 1) for k in (8, 16, 32)] == [6.9, 12.1, 19.1]
    assert expected_accepted(1.0, 16) == 16
    with pytest.raises(ValueError, match="never ends"):
        expected_accepted(1.0, None)


def test_positions():
    found = by_position(simulated(0.8, 6))
    np.testing.assert_allclose(found.per_checked.estimate, 0.8, atol=0.04)
    np.testing.assert_allclose(found.per_proposed.estimate, 0.8 ** np.arange(1, 7), atol=0.04)
    assert (np.diff(found.n_rounds) < 0).all() and found.n_rounds[0] == 3000


def test_positions_that_few_requests_reach_are_left_out():
    accepted = [1] * 30 + [3] * 5
    found = by_position(rounds_of(accepted, np.arange(35), depth=8))
    assert found.n_rounds.tolist() == [35, 35]


def test_residency_by_hand():
    def experts(*rows):
        return np.isin(np.arange(4), np.array(rows)[:, None]).reshape(1, 4) if rows else np.zeros((1, 4), bool)

    needed = np.stack([experts(0, 1), experts(1, 2), experts(0, 3), experts(1, 2)])
    predicted = np.stack([experts(0), experts(2), experts(3), experts()])
    rounds = rounds_of([0, 0, 0, 0], [0, 0, 0, 1], 1, needed, predicted)
    found = residency(rounds, slots=2)
    assert found.distinct.tolist() == [2, 2, 2, 2]
    assert found.resident.tolist() == [0, 1, 0, 0]  # the second request starts with an empty cache
    assert found.predicted.tolist() == [1, 1, 1, 0]
    assert residency(rounds, slots=4).resident.tolist() == [0, 1, 1, 0]


def test_one_request_has_no_interval():
    with pytest.raises(UserError, match="at least 2"):
        measure(rounds_of([1, 2], [0, 0], depth=4))
