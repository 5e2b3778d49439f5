"""Depth controllers on made-up workloads whose best depth is known."""

from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
import pytest

from specter_lab.models.anatomy import anatomy_of
from specter_lab.plan.cost import round_cost
from specter_lab.plan.depth_control import (
    CycleTimes,
    DepthController,
    FixedDepth,
    OnlineDepth,
    RooflineGovernor,
    cycle_times,
)
from specter_lab.plan.depth_estimates import RoundTimes
from specter_lab.plan.hardware import read_profile

MAX_DEPTH = 16
DEPTHS = range(MAX_DEPTH + 1)


@dataclass(frozen=True)
class Workload:
    """Acceptance of each position given those before it, and the time of a round by depth."""

    rates: tuple[float, ...]  # [MAX_DEPTH]
    ms: tuple[float, ...]  # [MAX_DEPTH + 1]

    def expected_rate(self, depth):
        return (1 + np.cumprod(self.rates)[:depth].sum()) / self.ms[depth]

    @property
    def best(self):
        return max(DEPTHS, key=self.expected_rate)


def workload(rates, ms):
    rates = rates if isinstance(rates, tuple) else (rates,) * MAX_DEPTH
    return Workload(rates, tuple(float(ms(depth)) for depth in DEPTHS))


STATIONARY = {
    "deep": workload(0.97, lambda k: 60 + 3 * k),
    "middle": workload(0.85, lambda k: 40 + 6 * k),
    "shallow": workload(0.5, lambda k: 30 + 8 * k),
    "plain decoding": workload(0.6, lambda k: 60 + 10 * k if k else 20),
    "hopeless": workload(0.05, lambda k: 20 + 15 * k),
    "falling": workload(tuple(0.95 - 0.05 * i for i in range(MAX_DEPTH)), lambda k: 50 + 4 * k),
    "kink": workload(0.95, lambda k: 50 + 3 * k + 2 * max(0, k - 8) ** 2),
    "copies": workload(0.93, lambda k: 120 + 0.5 * k + 60 * (1 - np.exp(-k / 5)) - 40 * (k > 0)),
}


class Rounds:
    """The same luck for every controller: what round r accepts at depth 16, and how its time deviates."""

    def __init__(self, phases, seed):
        draws = np.random.default_rng(seed)
        self.phases = [phase for phase, count in phases for _ in range(count)]
        luck = draws.random((len(self.phases), MAX_DEPTH))
        fails = luck >= np.array([phase.rates for phase in self.phases])
        self.accepted = np.where(fails.any(axis=1), fails.argmax(axis=1), MAX_DEPTH)
        self.noise = draws.normal(1, 0.08, len(self.phases)).clip(0.7, 1.3)

    def play(self, controller):
        """Depth, tokens and ms of every round."""
        table = np.empty((len(self.phases), 3))
        for i, phase in enumerate(self.phases):
            depth = controller.next_depth()
            accepted, ms = min(depth, int(self.accepted[i])), phase.ms[depth] * self.noise[i]
            controller.observe(depth, accepted, ms)
            table[i] = depth, accepted + 1, ms
        return table

    def best_fixed(self, since=0):
        return max(rate(self.play(FixedDepth(depth))[since:]) for depth in DEPTHS)


def rate(table):
    return table[:, 1].sum() / table[:, 2].sum()


def test_the_workloads_differ():
    best = {name: w.best for name, w in STATIONARY.items()}
    assert best["plain decoding"] == best["hopeless"] == 0
    assert best["shallow"] == 1 < best["middle"] < best["kink"] < best["deep"] == MAX_DEPTH
    for w in STATIONARY.values():
        assert all(w.expected_rate(w.best) > 1.05 * w.expected_rate(k) for k in {0, MAX_DEPTH} - {w.best})


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", STATIONARY)
def test_online_loses_at_most_5_percent_to_the_best_fixed_depth(name, seed):
    rounds = Rounds([(STATIONARY[name], 400)], seed)
    assert rate(rounds.play(OnlineDepth(MAX_DEPTH))) > 0.95 * rounds.best_fixed()


def test_no_fixed_depth_would_pass_everywhere():
    """The bound above can fail: whatever the K, some workload loses far more than 5 %."""
    for depth in DEPTHS:
        assert min(w.expected_rate(depth) / w.expected_rate(w.best) for w in STATIONARY.values()) < 0.75


@pytest.mark.parametrize("seed", range(4))
def test_online_follows_a_shift_within_20_rounds(seed):
    before, after = workload(0.97, lambda k: 40 + 6 * k), workload(0.5, lambda k: 40 + 6 * k)
    rounds = Rounds([(before, 200), (after, 200)], seed)
    played = rounds.play(OnlineDepth(MAX_DEPTH))
    assert median(played[150:200, 0]) >= 12 and before.best == MAX_DEPTH
    follows = median(played[220:240, 0])
    assert after.expected_rate(int(follows)) > 0.95 * after.expected_rate(after.best)
    assert rate(played[220:]) > 0.95 * rounds.best_fixed(since=220)
    assert rate(played) > rounds.best_fixed()  # one K for both halves


def test_online_follows_a_link_that_slows_down():
    fast, slow = workload(0.9, lambda k: 30 + 2 * k), workload(0.9, lambda k: 30 + 25 * k)
    rounds = Rounds([(fast, 150), (slow, 150)], seed=0)
    played = rounds.play(OnlineDepth(MAX_DEPTH))
    assert rate(played[170:]) > 0.93 * rounds.best_fixed(since=170)


def test_online_can_afford_a_trial_in_the_end():
    """Six drafts fail before all succeed. Plain rounds are short, so a deep trial may lose almost all that trials may ever lose."""
    controller, noise = OnlineDepth(MAX_DEPTH), np.random.default_rng(0).normal(1, 0.12, 1500).clip(0.7, 1.3)
    depths, drafts = [], 0
    for of_round in noise.tolist():
        depth = controller.next_depth()
        drafts += depth > 0
        controller.observe(depth, 0 if drafts <= 6 else depth, (320 + 68 * depth if depth else 176) * of_round)
        depths.append(depth)
    assert median(depths[-50:]) == MAX_DEPTH


def test_online_comes_back_from_plain_decoding():
    before, after = STATIONARY["hopeless"], STATIONARY["deep"]
    played = Rounds([(before, 150), (after, 400)], seed=0).play(OnlineDepth(MAX_DEPTH))
    assert median(played[100:150, 0]) == 0
    assert median(played[-100:, 0]) >= 12


def test_equal_rounds_give_equal_depths():
    rounds = Rounds([(STATIONARY["middle"], 100)], seed=3)
    assert (rounds.play(OnlineDepth(MAX_DEPTH)) == rounds.play(OnlineDepth(MAX_DEPTH))).all()


def test_deciding_takes_microseconds():
    rounds = Rounds([(STATIONARY["middle"], 300)], seed=0)
    for controller in (OnlineDepth(32), RooflineGovernor(16, lambda k: CycleTimes(k, 0, 0, 10))):
        times_s = []
        for i in range(300):
            start = perf_counter()
            depth = controller.next_depth()
            chosen = perf_counter()
            controller.observe(depth, min(depth, int(rounds.accepted[i])), 40 + 6 * depth)
            times_s += [chosen - start, perf_counter() - chosen]
        assert median(times_s[0::2]) < 200e-6
        assert median(times_s[1::2]) < 200e-6


def test_round_times_are_learned_from_few_depths_and_keep_their_shape():
    times = RoundTimes(MAX_DEPTH)
    for depth in (2, 0, 4, 2, 0, 4):
        times.observe(depth, 50 + 3 * depth)
    assert times.ms[8] == pytest.approx(74, rel=0.1)
    assert times.sd_ms()[16] > 2 * times.sd_ms()[4]
    for _ in range(20):
        assert not times.observe(4, 1.25 * 62)  # a link that gets slower bit by bit
    assert times.ms[4] == pytest.approx(1.25 * 62, rel=0.03)
    assert times.ms[2] > 1.15 * 56 and (np.diff(times.ms) > 0).all()  # the others move along, the slope stays
    assert [times.observe(4, 500.0) for _ in range(5)] == [False, False, False, True, False]  # another machine
    assert times.ms[16] == pytest.approx(500, rel=0.01)


def test_governor_by_hand():
    """Depth 2 costs 20, depth 1 costs 10 ms: it is worth it only if the second token is always accepted."""
    governor = RooflineGovernor(2, lambda k: CycleTimes(0, 0, 0, {1: 10, 2: 19}[k]))
    assert governor.next_depth() == 2  # p = 1, 1: 1/10 < 2/19
    governor.observe(2, 1, 19.0)  # p = 2/2, 1/2
    assert governor.next_depth() == 1  # 1/10 > 1.5/19
    for _ in range(20):
        governor.observe(2, 2, 19.0)  # p = 1, 21/22
    assert governor.next_depth() == 2  # 1.954/19
    governor.observe(2, 0, 19.0)  # the second token was never checked: p = 22/23, 21/22
    assert governor.next_depth() == 2


@pytest.mark.parametrize("name", ["deep", "middle", "shallow", "falling", "kink"])
def test_governor_maximises_accepted_tokens_over_cycle_time(name):
    case = STATIONARY[name]
    governor = RooflineGovernor(MAX_DEPTH, lambda k: CycleTimes(case.ms[k] / 2, case.ms[k] / 3, 0, case.ms[k] / 2))
    Rounds([(case, 600)], seed=1).play(governor)
    theta = [np.cumprod(case.rates)[:k].sum() / case.ms[k] for k in range(1, MAX_DEPTH + 1)]
    assert theta[governor.next_depth() - 1] > 0.97 * max(theta)


def test_cycle_times_are_the_cost_models():
    model, profile = anatomy_of("Qwen1.5-MoE-A2.7B"), read_profile()
    given = dict(depth=8, distinct_experts=20.0, resident_experts=9.0, slots=15)
    parts, cost = cycle_times(model, profile, **given), round_cost(model, profile, **given)
    assert (parts.draft_ms, parts.verify_ms) == (cost.draft_ms, cost.verify_ms)
    assert parts.pcie_init_ms + parts.pcie_new_ms == pytest.approx(cost.h2d_ms)
    assert parts.pcie_new_ms == pytest.approx(cost.h2d_ms * 5 / 11)  # 6 of 11 fit beside the residents
    assert parts.cycle_ms == max(parts.draft_ms, parts.pcie_init_ms) + parts.pcie_new_ms + parts.verify_ms


@pytest.mark.parametrize(
    "controller", [FixedDepth(4), OnlineDepth(4), RooflineGovernor(4, lambda k: CycleTimes(k, 0, 0, 1))]
)
def test_rounds_that_cannot_be(controller: DepthController):
    for depth, accepted, round_ms in ((2, 3, 1.0), (2, -1, 1.0), (2, 1, 0.0), (2, 1, float("nan"))):
        with pytest.raises(ValueError, match="no such round"):
            controller.observe(depth, accepted, round_ms)
    with pytest.raises(ValueError, match="depth 5"):
        OnlineDepth(4).observe(5, 0, 1.0)
    with pytest.raises(ValueError, match="max_depth"):
        RooflineGovernor(0, lambda k: CycleTimes(k, 0, 0, 1))


def test_depth_zero_alone():
    controller = OnlineDepth(0)
    for _ in range(5):
        assert controller.next_depth() == 0
        controller.observe(0, 0, 10.0)
