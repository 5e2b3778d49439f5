"""specter-ablation and specter-robustness on made-up recordings."""

from itertools import permutations

import numpy as np
import pandas as pd
import pytest

from specter_lab.experiments.claims import REPRODUCED, Setting, judge_all
from specter_lab.experiments.specter import ablation, dilution, offload, robustness
from specter_lab.plan.policies import find_policy
from specter_lab.plan.policy import Prefetcher
from specter_lab.plan.serve import PREFETCHED, PREFETCHED_USED
from specter_lab.plan.simulate import simulate
from specter_lab.plan.workload import Workload
from tests.experiments import made_up

DEEPSEEK = "deepseek-nano"
CPU = Setting("cpu")


@pytest.fixture(autouse=True)
def recordings(monkeypatch):
    made_up.use(monkeypatch)


@pytest.fixture
def traffic():
    return offload.traffic(DEEPSEEK, 0)


def measured(module, *models):
    return pd.DataFrame([row for model in models for row in module.measure(model, "", 0)])


def test_shapley_values_by_hand():
    """Two parts that do the same thing share its worth; a third one is worth what it adds whenever it goes."""
    value = {parts: 100 - 30 * bool(parts & {"SIC", "PIO"}) - 10 * ("SEE" in parts) for parts in ablation.subsets()}
    assert ablation.shapley(value) == pytest.approx({"SIC": 15, "PIO": 15, "SEE": 10})


def test_shapley_values_sum_to_the_whole_gain_and_do_not_depend_on_the_papers_order():
    rng = np.random.default_rng(0)
    value = {parts: float(rng.random()) for parts in ablation.subsets()}
    assert len(value) == 8
    worth = ablation.shapley(value)
    assert sum(worth.values()) == pytest.approx(value[frozenset()] - value[ablation.ALL])
    by_order = [
        [value[a] - value[b] for b, a in zip(left, left[1:])]
        for left in map(ablation.removals, permutations(ablation.PARTS))
    ]
    assert sum(map(sum, by_order)) / 6 == pytest.approx(sum(worth.values()))


def test_every_switch_switches_one_thing(traffic):
    full = ablation.policy_with(ablation.ALL)
    assert full == find_policy("specter")
    scene = offload.scene(traffic)
    no_pio = ablation.policy_with(frozenset({"SIC", "SEE"}))
    assert type(no_pio.prefetch(scene)) is Prefetcher and not no_pio.barrier and no_pio.depth_in(scene) == scene.depth
    no_sic = ablation.policy_with(frozenset({"PIO", "SEE"}))
    assert no_sic.depth_in(scene) == 3 and (no_sic.slots(scene) == scene.slots_per_layer - 6).all()
    assert no_sic.prefetch is full.prefetch and no_sic.barrier
    kept = ablation.policy_with(frozenset({"PIO", "SEE"}), ablation.KEPT)
    assert kept.depth_in(scene) == scene.depth and (kept.slots(scene) == no_sic.slots(scene)).all()
    assert ablation.removals() == [ablation.ALL, {"SIC", "SEE"}, {"SEE"}, frozenset()]


def test_ablation_rows_claims_and_figure():
    rows = measured(ablation, DEEPSEEK, "phi-nano")
    found = ablation.chosen(rows, ablation.VARIANT, DEEPSEEK).set_index(["sic", "pio", "see"])
    assert len(found) == 8
    for sic, pio in ((True, True), (True, False), (False, True), (False, False)):
        assert found.loc[(sic, pio, False), "simulated_tpot_ms"] > found.loc[(sic, pio, True), "simulated_tpot_ms"]
    assert found.loc[(True, True, True), "simulated_slowdown"] == 1
    assert (found.xs(False, level="pio")["simulated_prefetch_used_share"].isna()).all()
    worth = ablation.chosen(rows, ablation.VALUE, DEEPSEEK)
    steps = ablation.cumulative(rows, DEEPSEEK)["simulated_tpot_ms"]
    assert worth["simulated_gain_ms"].sum() == pytest.approx(steps.iloc[-1] - steps.iloc[0], abs=1e-3)
    assert worth["simulated_removal_share"].sum() == pytest.approx(1, abs=1e-3)
    verdicts = {
        verdict.id.split("/")[1]: verdict for verdict in judge_all("specter-ablation", ablation.claims(rows), CPU)
    }
    assert verdicts["slowdown@without-pio"].ours == pytest.approx(steps["without-pio"] / steps["full"], abs=2e-3)
    assert all(verdict.simulated and verdict.verdict != REPRODUCED for verdict in verdicts.values())
    assert verdicts["tpot@full"].verdict == "not run"
    assert not [name for name in rows if name.endswith("_ms") and not name.startswith("simulated_")]
    assert len(ablation.plot(rows).axes) == 4


def test_claims_without_the_claims_model():
    rows = measured(ablation, "phi-nano")
    assert all(m.value is None and "no deepseek model" in m.note for m in ablation.claims(rows))
    assert len(judge_all("specter-ablation", ablation.claims(rows), CPU)) == len(ablation.claims(rows))
    ablation.plot(rows)


@pytest.mark.parametrize("policy", robustness.POLICIES)
@pytest.mark.parametrize("precision", [1.0, 0.6])
def test_dilution_reaches_its_precision_and_changes_no_commit(traffic, policy, precision):
    ideal = Workload(dilution.perfect(traffic.requests.windows), traffic.requests.layers)
    scene = offload.scene(traffic)
    right, spoilt = (
        simulate(ideal, which, scene, new_tokens=offload.NEW_TOKENS)
        for which in (find_policy(policy), dilution.diluted(find_policy(policy), precision, 0))
    )
    counts = spoilt.hits.counts
    used = counts[PREFETCHED_USED] / counts[PREFETCHED]  # paper mode: less what a later plan evicted
    assert used == pytest.approx(precision, abs=0.03 if policy == "specter-fast" else 0.15)
    tokens = [[[count for _, count in commits] for commits in each.commits.values()] for each in (right, spoilt)]
    assert tokens[0] == tokens[1]
    if precision == 1:
        np.testing.assert_array_equal(right.rounds.end_ms, spoilt.rounds.end_ms)
    else:
        assert spoilt.rounds.h2d_bytes.sum() > right.rounds.h2d_bytes.sum()
        assert spoilt.tpot_ms(offload.NEW_TOKENS)["steady"] > right.tpot_ms(offload.NEW_TOKENS)["steady"]


def test_the_same_seed_spoils_the_same_way(traffic):
    scene = offload.scene(traffic)
    ends = [
        simulate(traffic.requests, dilution.diluted(find_policy("specter"), 0.6, seed), scene, new_tokens=offload.NEW_TOKENS).rounds.end_ms[-1]
        for seed in (0, 0, 1)
    ]  # fmt: skip
    assert ends[0] == ends[1] != ends[2]


def test_recall_and_precision_by_hand():
    """One layer, K = 2: the draft names {0, 1} and {1, 2}; the target uses {0, 1}, {1, 3} and, for the last token, {4, 5}."""
    found = made_up.windows(DEEPSEEK)
    shape = (1, 1, 2, 1, 2)
    one = dilution.replace(
        found, draft=np.array([0, 1, 1, 2], np.uint8).reshape(shape), draft_weights=np.ones(shape, np.float16),
        target=np.array([0, 1, 1, 3, 4, 5], np.uint8).reshape(1, 1, 3, 1, 2), target_weights=np.ones((1, 1, 3, 1, 2), np.float16),
        accepted=np.array([[2]]), prompt_set=("code",), prompt=found.prompt[:1],
    )  # fmt: skip
    sums = dilution.announced(one, depth=2, new_tokens=1)
    assert (sums.announced, sums.needed, sums.needed_by_drafted) == (3, 5, 3)
    assert (sums.both, sums.both_by_drafted) == (2, 2)


def test_rounds_follow_acceptance():
    found = made_up.windows(DEEPSEEK)
    starts = list(dilution.positions(found, request=0, depth=4, new_tokens=20))
    steps = np.minimum(found.accepted[0, starts], 4) + 1
    assert starts == [0, *np.cumsum(steps)[:-1]] and starts[-1] < 20 <= starts[-1] + steps[-1]


def test_robustness_rows_claims_and_figure():
    rows = measured(robustness, DEEPSEEK, "qwen-nano")
    for policy in robustness.POLICIES:
        curve = robustness.curve(rows, DEEPSEEK, policy)
        assert list(curve.index) == list(robustness.PRECISIONS)
        assert curve["simulated_prefetch_used_share"].is_monotonic_decreasing
        assert curve["simulated_prefetch_used_share"].iloc[-1] == pytest.approx(0.41, abs=0.05)
        assert curve["simulated_slowdown"].iloc[0] == 1 < curve["simulated_slowdown"].iloc[-1]
    assert (rows["requests_changed"].dropna() == 0).all()
    table = robustness.lookahead(rows)["value"]
    recall, drafted = (table.xs(name, level="definition") for name in (robustness.RECALL, robustness.RECALL_DRAFTED))
    assert (recall < drafted).all() and (drafted < 1).all()
    verdicts = {v.id.split("/")[1]: v for v in judge_all("specter-robustness", robustness.claims(rows), CPU)}
    assert verdicts["natural-recall"].ours == pytest.approx(recall.mean()) and not verdicts["natural-recall"].simulated
    assert verdicts["no-quality-loss"].ours == 0 and "by construction" in verdicts["no-quality-loss"].why
    robustness.plot(rows)


def test_changed_commits_would_be_found(traffic):
    """Rounds of another depth commit other tokens; the check must see them."""
    scene = offload.scene(traffic)
    deep, shallow = (
        simulate(traffic.requests, which, scene, new_tokens=offload.NEW_TOKENS)
        for which in (find_policy("specter"), ablation.replace(find_policy("specter"), depth=2))
    )
    assert robustness._row(deep, deep, deep, 0)["requests_changed"] == 0
    assert robustness._row(shallow, shallow, deep, 0)["requests_changed"] > 0.5
