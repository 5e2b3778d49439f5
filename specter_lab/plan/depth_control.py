"""How deep to draft in the next round. Three ways to decide, one interface:

    controller = OnlineDepth(max_depth=16)
    while not done:
        depth = controller.next_depth()                        # 0: plain decoding, no draft
        accepted, round_ms = one_round(depth)
        controller.observe(depth, accepted, round_ms)

`FixedDepth` takes the offline K* (`plan.depth.best_depth`), `RooflineGovernor` is MoE-SpeQ's, `OnlineDepth` learns both
acceptance and round times while it decodes. None of them draws random numbers: equal rounds give equal depths.
A round at depth K commits its accepted tokens and one more, the correction or bonus token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specter_lab.models.anatomy import Anatomy
from specter_lab.plan.cost import draft_step_ms, prefetched_experts, verify_ms
from specter_lab.plan.depth_estimates import Acceptance, RoundTimes
from specter_lab.plan.hardware import Profile


class DepthController(Protocol):
    """Chooses K before a round and is told afterwards what became of it."""

    def next_depth(self) -> int:
        """K of the next round, 0 or more. Asked once per round: a trial is paid for when it is handed out."""

    def observe(self, depth: int, accepted: int, round_ms: float) -> None:
        """A round that drafted `depth` tokens, of which the target accepted the first `accepted`, took `round_ms`.

        `depth` may differ from what was asked for (the end of a request). Raises ValueError for a round that cannot be.
        """


@dataclass(frozen=True)
class FixedDepth:
    """Always the same K."""

    depth: int

    def next_depth(self) -> int:
        return self.depth

    def observe(self, depth: int, accepted: int, round_ms: float) -> None:
        _check(depth, accepted, round_ms)


@dataclass(frozen=True)
class CycleTimes:
    """What a round of some K takes, in the parts that MoE-SpeQ's governor adds up (ms)."""

    draft_ms: float
    pcie_init_ms: float  # copies that run while the draft writes
    pcie_new_ms: float  # copies that the verification waits for
    verify_ms: float  # of k + 1 tokens

    @property
    def cycle_ms(self) -> float:
        return max(self.draft_ms, self.pcie_init_ms) + self.pcie_new_ms + self.verify_ms


def cycle_times(
    model: Anatomy, profile: Profile, *, depth: int, distinct_experts: float, resident_experts: float, slots: float
) -> CycleTimes:
    """The cost model's times of a round (arguments: as `plan.cost.round_cost` has them)."""
    missing = distinct_experts - resident_experts
    prefetched = prefetched_experts(depth, missing, slots - resident_experts)
    copy_ms = model.moe_layers * profile.h2d_ms(model.expert_bytes)
    return CycleTimes(
        draft_ms=depth * draft_step_ms(model, profile),
        pcie_init_ms=prefetched * copy_ms,
        pcie_new_ms=(missing - prefetched) * copy_ms,
        verify_ms=verify_ms(model, profile, depth + 1, distinct_experts),
    )


class RooflineGovernor:
    """MoE-SpeQ's governor: the k >= 1 with the largest Theta(k) = k_acc(k) / T_cycle(k).

    k_acc(k) = sum over i <= k of p_1 ... p_i, T_cycle(k) = max(T_draft, T_pcie,init) + T_pcie,new + T_verify(k + 1).
    p_i is the running average of "token i was accepted" over the rounds whose tokens before i were. The paper leaves
    open what stands in for a position that no round has reached; here it counts as accepted once, so that depth is
    tried. Theta counts drafted tokens only, not the one that every round adds, and the times are given, not measured.
    """

    def __init__(self, max_depth: int, times: Callable[[int], CycleTimes]) -> None:
        """`times` gives the round times of a depth; it is asked once for each of 1..max_depth."""
        if max_depth < 1:
            raise ValueError(f"the governor chooses from 1 up to max_depth, which is {max_depth}")
        self._cycle_ms = np.array([times(k).cycle_ms for k in range(1, max_depth + 1)])
        self._passed = np.ones(max_depth)
        self._checked = np.ones(max_depth)

    def next_depth(self) -> int:
        tokens = np.cumprod(self._passed / self._checked).cumsum()  # k_acc(1), k_acc(2), ...
        return int((tokens / self._cycle_ms).argmax()) + 1

    def observe(self, depth: int, accepted: int, round_ms: float) -> None:
        _check(depth, accepted, round_ms)
        self._passed[:accepted] += 1
        self._checked[: min(accepted + 1, depth)] += 1


class OnlineDepth:
    """A model-based bandit over K = 0..max_depth that maximises tokens per millisecond.

    Depths share what they learn. Acceptance at position i is seen by every round with K >= i, and round times follow a
    curve in K (`RoundTimes`). The depth with the best estimated rate is taken, save for trials: a depth that could be
    better, seen optimistically, is tried once `exploration` of the time spent so far has paid for what it would lose.
    The first rounds start shallow (also after the machine has changed), and no depth is more than twice the deepest one
    tried.

    On made-up workloads of 400 rounds whose times vary by 8 %, it stays within 5 % of the best fixed depth in hindsight
    (tests); with times that vary by 25 %, within 5 % on average and 13 % at worst.
    """

    START = (2, 0, 4)  # depths of the first rounds
    LARGEST_LOSS = 4.0  # of one trial, in rounds
    HOPE = 2.0  # standard deviations by which an optimist expects rounds to be shorter

    def __init__(self, max_depth: int, *, exploration: float = 0.015) -> None:
        if max_depth < 0:
            raise ValueError(f"max_depth is {max_depth}, it must be 0 or more")
        self.max_depth = max_depth
        self._acceptance = Acceptance(max_depth)
        self._times = RoundTimes(max_depth)
        self._exploration = exploration
        self._credit_ms = 0.0  # what trials may lose
        self._deepest = 0
        self._rounds = 0

    def next_depth(self) -> int:
        if self._rounds < len(self.START):
            return min(self.START[self._rounds], self.max_depth)
        reach = min(2 * max(self._deepest, 1), self.max_depth) + 1  # depths that may be taken: 0..reach - 1
        tokens, tokens_at_best = self._acceptance.tokens()
        ms, sd_ms = self._times.ms, self._times.sd_ms()
        rates = (tokens / ms)[:reach]
        best = int(rates.argmax())
        hopes = (tokens_at_best / np.maximum(ms - self.HOPE * sd_ms, 0.25 * ms))[:reach]
        loss_ms = ms[:reach] - tokens[:reach] / rates[best]
        hopes[loss_ms > self.LARGEST_LOSS * ms[best]] = 0
        hopes[best] = 0
        trial = int(hopes.argmax())
        if hopes[trial] > rates[best] and loss_ms[trial] <= self._credit_ms:
            self._credit_ms -= loss_ms[trial]
            return trial
        return best

    def observe(self, depth: int, accepted: int, round_ms: float) -> None:
        _check(depth, accepted, round_ms)
        if depth > self.max_depth:
            raise ValueError(f"a round of depth {depth}, the controller was made for up to {self.max_depth}")
        self._acceptance.observe(depth, accepted)
        self._rounds += 1
        if self._times.observe(depth, round_ms):
            self._rounds = 0
        most_ms = self.LARGEST_LOSS * float(self._times.ms.max())  # more than any trial may lose: none waits for ever
        self._credit_ms = min(self._credit_ms + self._exploration * round_ms, most_ms)
        self._deepest = max(self._deepest, depth)


def _check(depth: int, accepted: int, round_ms: float) -> None:
    if not 0 <= accepted <= depth or not round_ms > 0:
        raise ValueError(f"{accepted} of {depth} drafted tokens accepted in {round_ms} ms: no such round")
