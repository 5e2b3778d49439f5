"""What is particular to each policy."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specter_lab.errors import UserError
from specter_lab.experiments.specter import offload
from specter_lab.plan import policies, serve
from specter_lab.plan.policies import POLICIES, find_policy
from specter_lab.plan.policies.fiddler import popularity
from specter_lab.plan.policies.moe_infinity import PRIOR_TOKENS, Activations
from specter_lab.plan.policies.promoe import next_layer, predicted
from specter_lab.plan.policies.sp_moe import copies_per_layer, cutoff_layer
from specter_lab.plan.simulate import simulate
from tests.plan.made import needs_of, scene_of, windows_of

README = Path(policies.__file__).with_name("README.md").read_text(encoding="utf-8")


def run(name, windows=None, slots=4, **costs):
    windows = windows_of(fewer=name == "ss-moe", positions=16, layers=4) if windows is None else windows
    workload, scene = scene_of(windows, slots, **costs)
    return simulate(workload, find_policy(name), scene, new_tokens=windows.positions, record=True)


def test_every_policy_says_what_it_is():
    assert len(POLICIES) == len(policies.MODULES)
    assert {p.id for p in POLICIES.values() if p.lossy} == {"moe-spec", "moe-apex"}
    for policy in POLICIES.values():
        assert policy.title and policy.source


def test_the_worked_example_runs(monkeypatch):
    example, use = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(example.splitlines()) < 40
    names = {}
    exec(example, names)
    workload, scene = scene_of(windows_of(), slots=3)
    found = simulate(workload, names["POLICY"], scene, new_tokens=12)
    late = simulate(workload, find_policy("sp-l"), scene, new_tokens=12)
    assert 0 < found.hits.counts[serve.PREFETCHED] < late.hits.counts[serve.PREFETCHED]
    monkeypatch.setitem(POLICIES, "first-token", names["POLICY"])  # what its line in MODULES does
    monkeypatch.setattr(offload, "traffic", lambda model, seed: offload.Traffic(model, scene.history, workload))
    monkeypatch.setattr(offload, "scene", lambda traffic: scene)
    exec(use.replace("new_tokens=128", "new_tokens=12"), used := {})
    assert used["simulation"].rounds.end_ms[-1] == found.rounds.end_ms[-1]


@pytest.mark.parametrize("slots", [1, 2])
def test_specter_that_is_full_at_once_still_plans_at_the_end(slots):
    """Every token brings two predictions per layer: all there is room for at the first boundary of a window of five."""
    windows = windows_of(depth=5, positions=16, layers=4)
    early, single, specter, late = (
        run(name, windows, slots=slots).hits for name in ("specter-early", "sp-e", "specter", "sp-l")
    )
    assert (early.counts == single.counts).all()
    rates = [hits.rates()["token-weighted"] for hits in (single, late, specter)]
    assert rates[0] < rates[1] <= rates[2] + 1e-9


def test_lfu_counts_uses_that_were_misses():
    """With one slot everything misses; what was used most must not be forgotten for it."""
    windows = windows_of(requests=1, positions=4, depth=0, layers=1, experts=4, top_k=1, prompt=2)
    used = np.array([0, 0, 1, 0], np.uint8).reshape(1, 4, 1, 1, 1)
    found = run("lfu", replace(windows, target=used, prompt=np.full((1, 1, 1, 1), 2, np.uint8)), slots=2)
    # 2 and 0 are there; 1 evicts 2, used as often as 2 but later; the last 0 hits
    assert found.hits.counts[serve.NEEDED_READY] == 2


def test_next_layer_tables():
    """Layer 1 repeats layer 0 shifted by one; the table knows."""
    first = np.random.default_rng(0).permuted(np.tile(np.arange(6), (2, 50, 1)), axis=2)[..., :1]
    experts = np.stack([first, (first + 1) % 6], axis=2)  # [R, N, 2, 1]
    tables = next_layer(experts, 6)
    np.testing.assert_array_equal(tables[0], np.roll(np.eye(6), 1, axis=1))
    known, layers, guesses = predicted(tables, np.array([[[2], [4], [2]], [[0], [0], [0]]]))
    assert (known.tolist(), layers.tolist(), guesses.tolist()) == ([0], [1], [3])


def test_promoe_prefetches_what_comes_next():
    """Every layer uses what the first uses, shifted: the tables know, so most of what is copied ahead is used."""
    windows = windows_of(positions=16, layers=4)
    shifted = (windows.target[..., :1, :] + np.arange(4, dtype=np.uint8)[:, None]) % 8
    windows = replace(windows, target=shifted, prompt=(windows.prompt[..., :1, :] + np.arange(4)[:, None]) % 8)
    workload, scene = scene_of(windows, 3, history=windows, copy_ms=2.0)
    found = simulate(workload, find_policy("promoe"), scene, new_tokens=16, record=True)
    counts = found.hits.counts
    assert counts[serve.PREFETCHED_USED] > 0.6 * counts[serve.PREFETCHED] > 0
    for span in found.spans:
        assert span.work != "prefetch" or span.layer > 0


def test_activations_of_another_request_are_forgotten():
    _, scene = scene_of(windows_of(layers=1), slots=2)
    scores = Activations(scene)
    at_first = scores.update([0], needs_of([1, 2])).copy()
    later = scores.update([0], needs_of([3, 4]))
    assert later[0, 1] > at_first[0, 1] * PRIOR_TOKENS / (PRIOR_TOKENS + 1)
    assert scores.update([1], needs_of([5, 6])) == pytest.approx(at_first)


def test_activations_do_not_look_at_the_pass_that_begins():
    _, scene = scene_of(windows_of(layers=1), slots=2)
    one, other = Activations(scene), Activations(scene)
    np.testing.assert_array_equal(one.update([0], needs_of([1, 2])), other.update([0], needs_of([6, 7])))


def test_the_cutoff_is_what_fits_into_the_draft():
    windows = windows_of(layers=4)
    _, scene = scene_of(windows, slots=4)
    per_layer = copies_per_layer(scene)
    assert 0 < per_layer <= 4
    for copy_ms in (0.1, 2.0, 5.0, 1e4):
        cutoff = cutoff_layer(scene_of(windows, slots=4, copy_ms=copy_ms)[1])
        assert cutoff == 4 or cutoff * per_layer * copy_ms <= 4 * 4.0 < (cutoff + 1) * per_layer * copy_ms
    assert copies_per_layer(scene_of(windows, slots=8)[1]) == 0 and cutoff_layer(scene_of(windows, slots=8)[1]) == 4


def test_sp_moe_leaves_late_layers_alone():
    cutoff = cutoff_layer(scene_of(windows_of(positions=16, layers=4), copy_ms=4.0)[1])
    prefetched = {s.layer for s in run("sp-moe", copy_ms=4.0).spans if s.work == "prefetch"}
    assert 0 < cutoff < 4 and prefetched and max(prefetched) < cutoff


def test_the_lossy_ones_say_how_much():
    """Weights sum to one per token and layer, and what is dropped or computed in INT4 is a share of them."""
    spec, apex = run("moe-spec", slots=2), run("moe-apex", slots=2)
    kept, dropped = spec.hits.weights[[serve.WEIGHT, serve.WEIGHT_DROPPED]]
    assert kept + dropped == pytest.approx(spec.rounds.depth.size * 5 * 4, rel=1e-3)
    assert 0 < spec.hits.dropped_share < 0.5 and spec.hits.counts[serve.DROPPED] > 0
    assert spec.hits.draft_precision_share == 0
    assert 0 < apex.hits.draft_precision_share < 1 and apex.hits.dropped_share == 0
    assert apex.hits.counts[serve.DRAFT_WEIGHT_MISSES] > 0
    exact = run("specter", slots=2)
    assert exact.hits.dropped_share == exact.hits.draft_precision_share == 0


def test_moe_spec_computes_no_more_than_its_budget():
    spec = run("moe-spec", slots=2)
    passes = spec.rounds.depth.size * 4
    assert spec.hits.counts[serve.NEEDED] <= 4 * passes  # twice the top-k


def test_the_cpu_computes_when_it_is_sooner():
    slow_link = run("hybrimoe", copy_ms=50.0).hits.counts
    slow_cpu = run("hybrimoe", cpu_read_ms=50.0).hits.counts
    assert slow_link[serve.CPU_MISSES] > 0 and slow_cpu[serve.CPU_MISSES] == 0


def test_fiddler_keeps_the_popular_ones_and_computes_the_rest():
    windows = windows_of(positions=16, layers=4)
    workload, scene = scene_of(windows, slots=2)
    found = simulate(workload, find_policy("fiddler"), scene, new_tokens=16, record=True)
    slots = 2 + scene.pool_slots
    placed = {(s.layer, s.expert) for s in found.spans if s.work == "prefetch"}
    popular = popularity(scene).argsort(axis=1, kind="stable")[:, ::-1]
    assert len(placed) == 4 * slots and found.hits.counts[serve.COPIES] == 4 * slots
    for layer, expert in placed:
        rank = np.flatnonzero(popularity(scene)[layer][popular[layer]] == popularity(scene)[layer, expert])[0]
        assert rank < slots
    assert found.hits.counts[serve.CPU_MISSES] > 0


def test_read_through_takes_no_slot():
    found = run("specter-read", slots=2)
    assert found.hits.counts[serve.READ_THROUGH_MISSES] > 0
    assert found.hits.counts[serve.COPIES] == found.hits.counts[serve.PREFETCHED]


def test_the_oracle_wastes_nothing_and_is_not_beaten_by_the_draft():
    oracle, fast = run("oracle", slots=5, copy_ms=1.0), run("specter-fast", slots=5, copy_ms=1.0)
    counts = oracle.hits.counts
    assert counts[serve.PREFETCHED_USED] == counts[serve.PREFETCHED] > 0
    assert oracle.hits.rates()["distinct"] >= fast.hits.rates()["distinct"]


def test_the_oracle_is_no_bound_where_the_link_is_slow():
    """What it has not begun to copy is a miss; a plan that waits for all of its copies has more hits, and takes longer."""
    rates, ends = {}, {}
    for copy_ms in (0.1, 40.0):
        for name in ("oracle", "sp-l"):
            found = run(name, windows_of(positions=16, layers=8, agree=1.0), slots=4, copy_ms=copy_ms)
            rates[name, copy_ms], ends[name, copy_ms] = found.hits.rates()["token-weighted"], found.rounds.end_ms[-1]
    assert rates["oracle", 0.1] > rates["sp-l", 0.1]
    assert rates["oracle", 40.0] < rates["sp-l", 40.0] and ends["oracle", 40.0] < ends["sp-l", 40.0]


def test_knowing_the_future_takes_a_future():
    workload, scene = scene_of(windows_of())
    with pytest.raises(UserError, match="policy 'belady' has to know the future"):
        simulate(workload, find_policy("belady"), replace(scene, future=None), new_tokens=4)
