"""Acceptance of drafted tokens over verification rounds, and what it should come to.

Of the K tokens a round proposes, the target checks them in order up to the first it rejects:

    accepted / checked    a, the chance of a token whose predecessors were all accepted: Specter's 96.63 %
    accepted / proposed   what is left of K after everything behind a rejection is thrown away; falls with K

With the same `a` at every position a round is expected to accept a (1 - a^K) / (1 - a) tokens; a / (1 - a) is the limit
for K -> infinity and no round of finite depth reaches it. One more token per round is the target's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specter_lab.measure.bootstrap import Interval, ratio_interval
from specter_lab.measure.locality import last_uses, lru_held
from specter_lab.measure.speculate import Rounds

FEWEST_REQUESTS = 20  # a position that fewer requests reach has no interval worth showing


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of one depth; intervals are bootstrapped over requests."""

    depth: int  # K
    n_rounds: int
    per_checked: Interval
    per_proposed: Interval
    tokens_per_round: Interval  # accepted tokens and the target's own


@dataclass(frozen=True)
class PositionAcceptance:
    """Acceptance at window positions 1 .. J, the last that FEWEST_REQUESTS requests reach; arrays [J]."""

    per_checked: Interval  # of the rounds that got there
    per_proposed: Interval  # of all rounds: everything up to this position was accepted
    n_rounds: np.ndarray  # that got there


@dataclass(frozen=True)
class Residency:
    """Expert counts per round, mean over the MoE layers, for an LRU cache that starts a request empty; arrays [N]."""

    distinct: np.ndarray  # experts the K + 1 inputs use
    resident: np.ndarray  # of these: in the cache when the round starts
    predicted: np.ndarray  # of the others: named by the draft's routing


def measure(rounds: Rounds, *, seed: int = 0) -> Acceptance:
    """Acceptance over all rounds.

    Raises:
        UserError: the rounds belong to fewer than two requests.
    """
    checked = np.minimum(rounds.accepted + 1, rounds.depth)  # [N]
    sums = _per_request(rounds, np.stack([rounds.accepted, checked, np.ones_like(checked)], axis=1))  # [R, 3]
    accepted, checked, count = sums.T
    return Acceptance(
        rounds.depth,
        len(rounds.accepted),
        ratio_interval(accepted, checked, seed=seed),
        ratio_interval(accepted, rounds.depth * count, seed=seed),
        ratio_interval(accepted + count, count, seed=seed),
    )


def by_position(rounds: Rounds, *, seed: int = 0) -> PositionAcceptance:
    """Acceptance at every position of the window that enough requests reach.

    Raises:
        UserError: fewer than two requests.
    """
    position = np.arange(rounds.depth)
    accepted = _per_request(rounds, rounds.accepted[:, None] > position)  # [R, K]
    checked = _per_request(rounds, rounds.accepted[:, None] >= position)  # [R, K]
    reached = (checked > 0).sum(axis=0) >= FEWEST_REQUESTS  # falls with the position
    accepted, checked = accepted[:, reached], checked[:, reached]  # [R, J]
    every_round = np.repeat(checked[:, :1], checked.shape[1], axis=1)
    return PositionAcceptance(
        ratio_interval(accepted, checked, seed=seed),
        ratio_interval(accepted, every_round, seed=seed),
        checked.sum(axis=0),
    )


def expected_accepted(acceptance: float, depth: int | None) -> float:
    """Accepted tokens of a round of `depth` when every checked token passes with the same chance; None: no bound.

    Raises:
        ValueError: unbounded at an acceptance of 1.
    """
    if depth is not None:
        return float(sum(acceptance**i for i in range(1, depth + 1)))
    if acceptance >= 1:
        raise ValueError("with an acceptance of 1 an unbounded window never ends")
    return acceptance / (1 - acceptance)


def residency(rounds: Rounds, slots: int) -> Residency:
    """What an LRU cache of `slots` experts per MoE layer holds of each round's experts."""
    resident = np.zeros_like(rounds.needed)  # [N, L, E]
    for request in np.unique(rounds.request):
        mine = rounds.request == request
        held = lru_held(last_uses(rounds.needed[mine])[:-1], slots)  # before each round
        resident[mine] = rounds.needed[mine] & held
    predicted = rounds.needed & rounds.predicted & ~resident
    return Residency(*(experts.sum(axis=2).mean(axis=1) for experts in (rounds.needed, resident, predicted)))


def _per_request(rounds: Rounds, values: np.ndarray) -> np.ndarray:
    """Sums over each request's rounds: [N, M] -> [R, M]."""
    requests, index = np.unique(rounds.request, return_inverse=True)
    sums = np.zeros((len(requests), values.shape[1]))
    np.add.at(sums, index, values)
    return sums
