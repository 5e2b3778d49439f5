"""How often experts of a popularity *rank* are needed (ZipMoE), whichever experts these are at the time.

Every layer's experts are ranked by recent use, and pi_r is the probability that the expert of rank r is among the k active
ones. The active set is modelled as conditional Bernoulli: independent draws with odds w_r, given that exactly k succeed. The
paper plans with independent draws q_r, scaled so that k succeed on average; hits of a pool then follow a Poisson-binomial law.
"""

from __future__ import annotations

import numpy as np

DECAY = 0.97  # of an expert's count per token: about the last 33 tokens decide the rank
PRIOR = 0.05  # weight of the long-term share in the score


class RankTracker:
    """Ranks of one layer's experts, causally: what was used recently stands in front."""

    def __init__(self, prior: np.ndarray, decay: float = DECAY) -> None:
        """`prior` [E]: shares of long-term use (sum 1), from earlier prompts; they decide where recent use does not."""
        self._prior = np.asarray(prior, float) * len(prior)
        self._recent = np.zeros(len(prior))
        self._decay = decay

    @property
    def score(self) -> np.ndarray:
        """[E], higher is more popular."""
        return self._recent + PRIOR * self._prior

    def ranks(self) -> np.ndarray:
        """Rank of every expert, 0 the most popular: [E] int64."""
        ranks = np.empty(len(self._prior), np.int64)
        ranks[np.argsort(-self.score, kind="stable")] = np.arange(len(ranks))
        return ranks

    def observe(self, experts: np.ndarray) -> None:
        """One layer call that used these distinct experts."""
        self._recent *= self._decay
        self._recent[experts] += 1


def inclusion(hits: np.ndarray, active: float) -> np.ndarray:
    """pi_r = k x share of rank r, monotone and below 1: uses per rank [E] -> [E], sum k.

    Counts scatter, so a later rank may have more of them; running means (pool adjacent violators) make the curve fall.
    """
    share = _falling((hits + 0.5) / (hits.sum() + 0.5 * len(hits)))
    return _capped(active * share, active)


def _falling(values: np.ndarray) -> np.ndarray:
    """The nearest non-increasing sequence, by pooling adjacent violators."""
    groups: list[list[float]] = []  # mean, length
    for value in values:
        groups.append([float(value), 1])
        while len(groups) > 1 and groups[-2][0] < groups[-1][0]:
            mean, length = groups.pop()
            total = groups[-1][1] + length
            groups[-1] = [(groups[-1][0] * groups[-1][1] + mean * length) / total, total]
    return np.concatenate([np.full(int(length), mean) for mean, length in groups])


def _capped(pi: np.ndarray, total: float, most: float = 0.999) -> np.ndarray:
    """Probabilities below 1 with the same sum: what is cut off goes to the others in proportion."""
    pi = pi.astype(float)
    for _ in range(len(pi)):
        over = pi > most
        if not over.any() or over.all():
            break
        pi[over] = most
        rest = ~over
        pi[rest] *= (total - most * over.sum()) / pi[rest].sum()
        if pi[rest].max() <= most:
            break
    return np.minimum(pi, most)


def elementary(weights: np.ndarray, most: int) -> np.ndarray:
    """Elementary symmetric polynomials e_0 .. e_most of the weights: [most + 1]."""
    e = np.zeros(most + 1)
    e[0] = 1.0
    for weight in weights:
        e[1:] += weight * e[:-1]
    return e


def bernoulli_weights(pi: np.ndarray, active: int, *, rounds: int = 2000, tolerance: float = 1e-9) -> np.ndarray:
    """Odds w [E] whose conditional-Bernoulli draw of `active` experts includes r with probability pi_r.

    The fixed point of w_r <- pi_r (e_k(w) / e_(k-1)(w without r)), Chen, Dempster and Liu 1994; scaled to odds whose
    independent draws have `active` successes on average.
    """
    w = pi / (1 - pi)
    for _ in range(rounds):
        w = scaled(w, active)
        found = conditional_inclusion(w, active)
        if np.abs(found - pi).max() < tolerance:
            break
        w = w * (pi / found)
    return scaled(w, active)


def conditional_inclusion(weights: np.ndarray, active: int) -> np.ndarray:
    """pihat_r = w_r e_(k-1)(w without r) / e_k(w): [E]."""
    whole = elementary(weights, active)[active]
    without = np.array([elementary(np.delete(weights, r), active - 1)[active - 1] for r in range(len(weights))])
    return weights * without / whole


def scaled(weights: np.ndarray, total: float) -> np.ndarray:
    """a w with the a for which q = a w / (1 + a w) sums to `total`; by bisection of log a."""
    low, high = -60.0, 60.0
    for _ in range(200):
        middle = (low + high) / 2
        odds = np.exp(middle) * weights
        low, high = (middle, high) if (odds / (1 + odds)).sum() < total else (low, middle)
    return np.exp((low + high) / 2) * weights


def success_probabilities(weights: np.ndarray, total: float) -> np.ndarray:
    """q [E] of independent draws with `total` successes on average."""
    odds = scaled(weights, total)
    return odds / (1 + odds)


def poisson_binomial(probabilities: np.ndarray, most: int) -> np.ndarray:
    """Law of the number of successes of independent draws, by dynamic programming: [most + 1]; the rest is more."""
    law = np.zeros(most + 1)
    law[0] = 1.0
    for p in probabilities:
        law[1:] = law[1:] * (1 - p) + law[:-1] * p
        law[0] *= 1 - p
    return law


def conditional_law(weights: np.ndarray, pool: slice, active: int) -> np.ndarray:
    """Law of the number of active experts whose rank is in `pool`, given `active` in all: [active + 1]."""
    inside = elementary(weights[pool], active)
    outside = elementary(np.delete(weights, np.r_[pool]), active)
    law = inside * outside[::-1]
    return law / law.sum()
