"""What online depth control learns from rounds: how far drafts are accepted, and how long rounds take, by depth."""

from __future__ import annotations

from collections import deque
from math import log

import numpy as np


class Acceptance:
    """Probability that position i is accepted, given that those before it were, for a workload that may change.

    Counts fade by FADE a round that drafts; rounds without a draft teach nothing, they only make the optimistic
    estimate more so. A position that is rarely reached borrows from the one before it. When the last rounds fit one
    acceptance rate of their own clearly better than the estimates (log likelihood ratio above ALARM over some number
    of rounds up to RECENT), everything older is forgotten.
    """

    FADE = 0.98
    BORROWED = 4.0  # checks that the estimate of the position before is worth
    RECENT = 16
    ALARM = 7.0

    def __init__(self, max_depth: int) -> None:
        self._passed = np.zeros(max_depth)
        self._checked = np.zeros(max_depth)
        self._recent: deque[tuple[int, int]] = deque(maxlen=self.RECENT)  # (depth, accepted)
        self._idle = 0  # rounds since the last draft

    def observe(self, depth: int, accepted: int) -> None:
        self._idle = 0 if depth else self._idle + 1
        if not depth:
            return
        self._recent.append((depth, accepted))
        if forget := self._change():
            recent = list(self._recent)[-forget:]
            self._passed[:] = self._checked[:] = 0
            self._recent.clear()
            for depth, accepted in recent:
                self._count(depth, accepted)
                self._recent.append((depth, accepted))
        else:
            self._count(depth, accepted)

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Expected tokens of a round at K = 0, 1, ..., max_depth; and the same seen optimistically."""
        return self._expected(self._rates(0.8)), self._expected(self._rates(1.0, self.FADE**self._idle))

    @staticmethod
    def _expected(rates: list[float]) -> np.ndarray:
        tokens = reached = 1.0
        by_depth = [tokens]
        for rate in rates:
            reached *= rate
            tokens += reached
            by_depth.append(tokens)
        return np.array(by_depth)

    def _rates(self, rate: float, weight: float = 1.0) -> list[float]:
        """By position; `rate` stands before the first, what was counted has `weight`."""
        rates = []
        for passed, checked in zip(self._passed.tolist(), self._checked.tolist()):
            rate = (weight * passed + self.BORROWED * rate) / (weight * checked + self.BORROWED)
            rates.append(rate)
        return rates

    def _count(self, depth: int, accepted: int) -> None:
        self._passed *= self.FADE
        self._checked *= self.FADE
        self._passed[:accepted] += 1
        self._checked[: min(accepted + 1, depth)] += 1

    def _change(self) -> int:
        """Number of last rounds after which acceptance seems to have changed; 0: it has not."""
        rates = np.clip(self._rates(0.8), 0.005, 0.995)
        log_pass = [0.0, *np.log(rates).cumsum().tolist()]
        log_fail = np.log1p(-rates).tolist()
        passed = failed = expected = 0.0
        best, since = self.ALARM, 0
        for rounds, (depth, accepted) in enumerate(reversed(self._recent), start=1):
            passed += accepted
            failed += accepted < depth
            expected += log_pass[accepted] + (log_fail[accepted] if accepted < depth else 0.0)
            own = sum(n * log(n / (passed + failed)) for n in (passed, failed) if n)
            if own - expected > best:
                best, since = own - expected, rounds
        return since


class RoundTimes:
    """Belief about the time of a round at every K: jointly Gaussian, updated by every round (a Kalman filter).

    Before the first round only the shape is known: one level for all depths, a slope in K, a step between 0 and 1
    (without a draft nothing is prefetched), and small smooth deviations. What one depth teaches moves the others with
    it. Each round a little of that uncertainty returns (DRIFT), so old rounds fade; after SURPRISES rounds in a row
    that are all far too long, or all far too short, the belief starts anew. How much rounds vary is learned as well.
    """

    LEVEL, SLOPE, STEP, LOCAL = 1.0, 1.0, 0.25, 0.15  # standard deviations, relative to the first round
    SMOOTH = 8  # depths over which deviations are alike
    NOISE, LEAST_NOISE = 0.1, 0.03  # of one round, relative to its time: at first, at least
    LEARN_NOISE = 0.05  # weight of one round in its running average
    DRIFT = 0.02  # standard deviation that returns each round, relative to the above
    SURPRISES, FAR = 3, 3.0  # rounds, standard deviations

    def __init__(self, max_depth: int) -> None:
        depths = np.arange(max_depth + 1)
        distance = np.abs(depths[:, None] - depths[None, :])
        scaled = depths / max(max_depth, 1)
        self._prior = (
            self.LEVEL**2 + self.SLOPE**2 * np.outer(scaled, scaled) + self.STEP**2 * np.outer(depths > 0, depths > 0)
            + self.LOCAL**2 * np.exp(-distance / self.SMOOTH)
        )  # [K + 1, K + 1]  # fmt: skip
        self.ms = np.zeros(max_depth + 1)  # [K + 1]; zeros: no round yet
        self._noise = self.NOISE**2  # relative variance of one round
        self._surprises = 0  # in a row; negative: too short

    def observe(self, depth: int, round_ms: float) -> bool:
        """One round; True when the belief has started anew with it."""
        anew = abs(self._surprises) >= self.SURPRISES
        if anew or not self.ms[0]:
            self.ms[:] = round_ms
            self._covariance = round_ms**2 * self._prior
            self._surprises = 0
        self._covariance += (self.DRIFT * self.ms[depth]) ** 2 * self._prior
        column = self._covariance[:, depth].copy()
        variance = column[depth] + self._noise * self.ms[depth] ** 2
        error_ms = round_ms - self.ms[depth]
        sign = int(np.sign(error_ms)) if abs(error_ms) > self.FAR * variance**0.5 else 0
        self._surprises = self._surprises + sign if sign and sign * self._surprises >= 0 else sign
        seen = max(error_ms**2 - column[depth], 0) / self.ms[depth] ** 2
        self._noise += self.LEARN_NOISE * (min(seen, self.FAR**2 * self._noise) - self._noise)
        self._noise = max(self._noise, self.LEAST_NOISE**2)
        self.ms += column / variance * error_ms
        np.maximum(self.ms, 1e-3 * round_ms, out=self.ms)
        self._covariance -= np.outer(column / variance, column)
        return anew

    def sd_ms(self) -> np.ndarray:
        """Standard deviation of the belief, by depth."""
        return np.sqrt(np.maximum(np.diagonal(self._covariance), 0))
