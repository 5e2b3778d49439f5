"""Hit rate, TPOT, I/O hiding and batch, end to end on a few made-up windows."""

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest

from specter_lab.errors import UserError
from specter_lab.experiments.claims import NOT_RUN, REPRODUCED, Setting, claims_of, judge_all
from specter_lab.experiments.specter import (
    batch,
    hit_ceilings,
    hit_rate,
    hit_rate_figure,
    io_hiding,
    io_hiding_figure,
    offload,
    simulated,
    tpot,
)
from specter_lab.experiments.specter.layer_systems import LAYER_SYSTEMS
from specter_lab.measure.prompts import PROMPT_SETS
from specter_lab.plan import serve
from specter_lab.plan.bounds import Passes
from specter_lab.plan.policies import POLICIES
from specter_lab.plan.simulate import simulate
from tests.plan.made import needs_of, windows_of

CPU = Setting("cpu")
GEOMETRY = {"deepseek-nano": (64, 6), "qwen-nano": (60, 4), "phi-nano": (16, 2)}  # experts, top-k
TOKENS = 24  # more than one round of 16
PAPERS = ("specter", "specter-fast", "specmoeoff", "sp-e", "sp-l", "lru", "lru-s")


@pytest.fixture(autouse=True)
def few_windows(monkeypatch):
    """Three requests of every prompt set, one of them history; Phi cannot draft with fewer experts."""

    def windows(model, seed, draft):
        if draft == "fewer" and model == "phi-nano":
            raise UserError("Phi picks two")
        experts, top_k = GEOMETRY[model]
        made = windows_of(
            seed,
            requests=15,
            positions=TOKENS,
            depth=16,
            layers=2,
            experts=experts,
            top_k=top_k,
            fewer=draft == "fewer",
        )
        return replace(made, prompt_set=tuple(np.repeat(PROMPT_SETS, 3).tolist()))

    monkeypatch.setattr(offload, "_windows", windows)
    monkeypatch.setattr(offload, "NEW_TOKENS", TOKENS)
    monkeypatch.setattr(offload, "HISTORY_PER_SET", 1)
    monkeypatch.setattr(hit_rate, "RESAMPLES", 50)
    monkeypatch.setattr(batch, "BATCHES", (1, 4))


@pytest.fixture
def papers_systems(monkeypatch):
    monkeypatch.setattr(simulated, "POLICIES", {name: POLICIES[name] for name in PAPERS})


@cache
def _rows(module, model, _systems):
    """Rows of one model; `_systems` are those that the test has chosen, every other setting is the same in all tests."""
    return tuple(module.measure(model, "", 0))


def measured(module, *models):
    return pd.DataFrame([row for model in models for row in _rows(module, model, tuple(simulated.POLICIES))])


def test_every_policy_is_a_system_and_phi_has_no_draft_with_fewer_experts():
    drafts = {policy.id: traffic.requests.fewer for policy, traffic in simulated.systems("deepseek-nano", 0)}
    assert list(drafts) == list(POLICIES)
    assert {name for name, fewer in drafts.items() if fewer} == {n for n, p in POLICIES.items() if p.draft == "fewer"}
    assert {policy.id for policy, _ in simulated.systems("phi-nano", 0)} == {
        n for n, p in POLICIES.items() if p.draft != "fewer"
    }


def test_too_few_prompts_are_not_mistaken_for_a_missing_draft(monkeypatch):
    def refuse(model, seed, draft):
        raise UserError("only 3 prompts")

    monkeypatch.setattr(offload, "_windows", refuse)
    with pytest.raises(UserError, match="only 3 prompts"):
        list(simulated.systems("phi-nano", 0))


def test_hit_rates_of_all_policies():
    rows = measured(hit_rate, "deepseek-nano")
    assert set(rows["system"]) == set(POLICIES) and set(rows["budget"]) == {"16 GB", "24 GB", "32 GB"}
    assert rows["simulated_hit_rate"].between(0, 1).all()
    assert (rows["simulated_hit_rate_ci_low"] <= rows["simulated_hit_rate_ci_high"]).all()
    assert (rows["simulated_hit_rate"] <= rows["ceiling"].fillna(1) + 1e-5).all()
    assert rows.loc[rows["system"] == "moe-spec", "ceiling"].isna().all()  # it needs fewer experts than the windows
    rate = rows.set_index(["definition", "system", "budget"])["simulated_hit_rate"]
    ceiling = rows.set_index(["definition", "system", "budget"])["ceiling"]
    for budget in ("16 GB", "24 GB", "32 GB"):
        for name in ("lru", "fifo", "lfu", "belady"):  # the same slots, so the same bound, and one that is no policy
            assert rate["token-weighted", name, budget] <= ceiling["token-weighted", "belady", budget] < 1
            assert ceiling["distinct", name, budget] == ceiling["token-weighted", "belady", budget]
    assert (
        ceiling["distinct", "lru-s", "24 GB"]
        == ceiling["distinct", "lru", "32 GB"]
        > ceiling["distinct", "lru", "24 GB"]
    )
    for definition in ("distinct", "token-weighted", "token-step"):
        assert rate[definition, "lru-s", "16 GB"] > rate[definition, "lru", "16 GB"]
        assert rate[definition, "lru-s", "24 GB"] == rate[definition, "lru", "32 GB"]  # 16 + 16 slots
    assert rate["distinct", "belady", "24 GB"] > rate["distinct", "lru", "24 GB"]
    hit_rate.plot(rows)


def test_six_slots_cannot_hold_a_window_of_16(papers_systems):
    rows = measured(hit_rate, "deepseek-nano")
    of_specter = hit_rate_figure.definitions(rows, "deepseek-nano", "specter", "16 GB")
    assert (of_specter["ceiling"].dropna() < 0.9985).all() and of_specter["ceiling"].notna().sum() == 6
    assert of_specter.loc["distinct", "ceiling"] < of_specter.loc["token-weighted", "ceiling"]
    assert of_specter.loc["slots used", "simulated_hit_rate"] > 0.9
    lru = hit_rate_figure.definitions(rows, "deepseek-nano", "lru", "16 GB")
    assert "prefetch precision" not in lru.index
    assert lru["ceiling"].dropna().nunique() == 1 and lru["ceiling"].max() < 1  # nobody copies ahead for it


def test_the_bound_of_demand_loading_by_hand():
    """Slots for two; experts 1, 2, then 1, 3, then 1, 2: the prompt's uses are no hits, 1 is kept for both of its next uses."""
    used = np.zeros((4, 1, 5), bool)
    for at, experts in enumerate(([1, 2], [1, 2], [1, 3], [1, 2])):
        used[at, 0, experts] = True
    passes = Passes(used, np.array([False, True, True, True]))
    assert hit_ceilings.best_demand_rate([passes], np.array([2])) == pytest.approx(5 / 6)  # bypassing 3 keeps 2
    assert hit_ceilings.best_demand_rate([passes, passes], np.array([1])) == pytest.approx(3 / 6)


def test_only_demand_loading_is_bounded_by_it():
    bounded = {name for name, policy in POLICIES.items() if hit_ceilings.demand_only(policy)}
    assert {"lru", "lru-s", "fifo", "lfu", "belady"} <= bounded
    assert not bounded & {"specter", "sp-e", "sp-l", "promoe", "oracle", "specmoeoff"}


def test_every_ceiling_mark_of_the_figure_is_a_ceiling_of_the_rows(papers_systems):
    rows = measured(hit_rate, "deepseek-nano")
    figure = hit_rate.plot(rows)
    assert len(figure.axes) == 6 and all(axis.get_title(loc="left") for axis in figure.axes)
    upper = figure.axes[0]
    marks = sorted(line.get_xdata()[0] for line in upper.lines if line.get_marker() == "|")
    kept = rows[(rows["budget"] == "16 GB") & (rows["definition"] == hit_rate_figure.JUDGED)]
    assert marks == pytest.approx(sorted(map(hit_rate_figure._position, kept["ceiling"])))


def test_best_contents_by_hand():
    needs = needs_of([1, 2, 3], [4])._replace(uses=np.array([1, 5, 2, 3]))
    assert hit_ceilings.best_contents(needs, np.array([2, 2])) == (3, 5 + 2 + 3)
    assert hit_ceilings.best_contents(needs, np.array([1, 1])) == (2, 5 + 3)


def test_hit_rate_claims_are_those_of_the_definition_chosen_before(papers_systems):
    rows = measured(hit_rate, "deepseek-nano")
    found = {m.id.split("/")[1]: m for m in hit_rate.claims(rows)}
    assert set(found) == {claim.id.split("/")[1] for claim in claims_of("specter-hit-rate")}
    cell = rows[(rows["system"] == "sp-l") & (rows["budget"] == "24 GB")].set_index("definition")
    assert found["sp-l@24"].value == cell.loc["token-weighted", "simulated_hit_rate"]
    assert "slots used" in found["sp-l@24"].note
    raised = rows.copy()
    raised.loc[raised["system"] == "specter", "simulated_hit_rate"] = 1.0
    best = [m for m in hit_rate.claims(raised) if m.id.endswith("specter-best")]
    assert best[0].value == 1.0 > found["specter-best"].value
    verdicts = judge_all("specter-hit-rate", found.values(), CPU)
    assert all(v.simulated and v.verdict != REPRODUCED for v in verdicts)


def test_hit_rate_without_deepseek(papers_systems):
    rows = measured(hit_rate, "phi-nano")
    assert set(rows["budget"]) == {"low budget", "high budget"}
    assert {v.verdict for v in judge_all("specter-hit-rate", hit_rate.claims(rows), CPU)} == {NOT_RUN}
    hit_rate.plot(rows)


def test_tpot_rows_and_claims(papers_systems):
    rows = measured(tpot, *GEOMETRY)
    assert len(rows) == 3 * 2 * (len(PAPERS) + len(LAYER_SYSTEMS)) * (1 + len(PROMPT_SETS))
    wide = rows.set_index(["model", "budget", "system", "prompt_set"]).sort_index()
    every = wide.loc[("qwen-nano", "high", "lru-s")]
    assert every.loc["all", "n_requests"] == 10 and every.loc["code", "n_requests"] == 2
    assert every.loc["all", "simulated_tpot_paper_ms"] == pytest.approx(
        every.drop("all")["simulated_tpot_paper_ms"].mean(), abs=1e-3
    )
    assert every.loc["all", "tokens_per_round"] == 1 and every.loc["all", "distinct_experts_per_layer"] == 4
    assert (
        pd.isna(every.loc["all", "acceptance"])
        and 0 < wide.loc[("qwen-nano", "high", "specter", "all"), "acceptance"] < 1
    )
    specter = rows[(rows["system"] == "specter") & (rows["prompt_set"] == "all")]
    assert (specter["simulated_tpot_paper_ms"] < specter["simulated_tpot_decode_ms"]).all()  # its first burst is free
    found = {m.id.split("/")[1]: m for m in tpot.claims(rows)}
    assert set(found) == {c.id.split("/")[1] for c in claims_of("specter-tpot")} - {"low-budget"}
    cells = tpot.by_cell(rows)
    assert len(cells) == 30
    assert found["speedup-over-specmoeoff@max"].value == pytest.approx((cells["specmoeoff"] / cells["specter"]).max())
    verdicts = {v.id: v for v in judge_all("specter-tpot", found.values(), CPU)}
    on_an_a100 = judge_all("specter-tpot", found.values(), Setting("cpu", gpu="NVIDIA A100-SXM4-40GB"))
    for verdict in (
        verdicts["specter-tpot/qwen@specter"],
        next(v for v in on_an_a100 if v.id.endswith("/qwen@specter")),
    ):
        assert verdict.verdict == NOT_RUN and verdict.why.startswith("simulated, not measured on an A100; ")
    legend = {text.get_text() for text in tpot.plot(rows).legends[0].get_texts()}
    assert {"steady", "decode", "the paper's formula", "one prompt set, the paper's formula"} <= legend


def test_the_order_of_systems_is_counted_in_pairs(papers_systems):
    rows = measured(tpot, "qwen-nano")
    place = {system: i for i, system in enumerate(tpot.IN_ORDER.values())}
    made_up = rows.assign(simulated_tpot_paper_ms=rows["system"].map(place).fillna(9.0) + 1)
    assert tpot._order(made_up).value == 1
    assert tpot._order(made_up).aside == ""
    made_up.loc[made_up["system"] == "lru-s", "simulated_tpot_paper_ms"] = 1.5
    assert tpot._order(made_up).value == pytest.approx(9 / 10)
    assert tpot._order(made_up).aside == "SpecMoEOff < MO-SM in 0% of the cells"
    made_up.loc[made_up["system"] == "specter", "simulated_tpot_paper_ms"] = 99
    assert tpot._order(made_up).value == pytest.approx(5 / 10)


def test_what_offloading_layers_moves(papers_systems):
    rows = measured(tpot, "deepseek-nano")
    moved = rows[rows["prompt_set"] == "all"].set_index(["system", "budget"])["simulated_h2d_mb_per_token"]
    assert moved["transformers", "high"] > moved["vllm", "high"] > moved["specter", "high"]
    assert moved["transformers-pinned", "high"] == pytest.approx(moved["transformers", "high"], rel=1e-6)
    ms = rows[rows["prompt_set"] == "all"].set_index(["system", "budget"])["simulated_tpot_paper_ms"]
    assert ms["transformers", "high"] > 3 * ms["transformers-pinned", "high"]
    assert moved["vllm-in-place", "high"] < moved["vllm", "high"] / 4
    assert moved["vllm", "low"] - moved["vllm", "high"] == pytest.approx(6000, abs=1)  # 24 - 18 GB


def test_hidden_share_is_that_of_the_simulation(papers_systems):
    rows = measured(io_hiding, *GEOMETRY)
    assert len(rows) == 3 * 2 * len(io_hiding.SYSTEMS)
    policy, traffic = next(pair for pair in simulated.systems("phi-nano", 0) if pair[0].id == "specter")
    done = simulate(traffic.requests, policy, offload.scene(traffic), new_tokens=TOKENS)
    row = rows[(rows["model"] == "phi-nano") & (rows["budget"] == "high")].set_index("system").loc["specter"]
    assert row["simulated_hidden_share"] == pytest.approx(done.hidden_share, abs=1e-4)
    parts = rows[list(io_hiding_figure.PARTS)].sum(axis=1)
    assert parts.to_numpy() == pytest.approx(rows["simulated_round_ms"].to_numpy(), abs=0.01)
    assert (rows["simulated_verify_ms"] > 0).all()
    found = {m.id.split("/")[1]: m for m in io_hiding.claims(rows)}
    assert set(found) == {c.id.split("/")[1] for c in claims_of("specter-io-hiding")}
    assert found["phi-h2d@total"].value > found["phi-h2d@exposed"].value == row["simulated_exposed_ms"]
    io_hiding.plot(rows)


def test_io_hiding_of_one_model(papers_systems):
    rows = measured(io_hiding, "qwen-nano")
    by_id = {v.id: v.verdict for v in judge_all("specter-io-hiding", io_hiding.claims(rows), CPU)}
    assert by_id["specter-io-hiding/phi-hides-least"] == NOT_RUN
    io_hiding.plot(rows)


def test_batches_by_both_clocks(papers_systems):
    rows = measured(batch, "deepseek-nano", "qwen-nano")
    assert len(rows) == 2 * 2 * (len(batch.SYSTEMS) + 1)
    plain, spec = (batch.curve(rows, "deepseek-nano", system) for system in ("lru", "specter"))
    assert plain.loc[4, batch.BATCH_CLOCK] == pytest.approx(
        plain.loc[4, batch.REQUEST_CLOCK], rel=0.15
    )  # all end together
    assert spec.loc[4, batch.BATCH_CLOCK] > 1.15 * spec.loc[4, batch.REQUEST_CLOCK]  # the slowest one ends it
    for points in (plain, spec):
        assert points[batch.WORKING_SET].is_monotonic_increasing
        assert (points[batch.THROUGHPUT] * points[batch.BATCH_CLOCK]).to_numpy() == pytest.approx(
            [1000, 4000], rel=1e-3
        )
    found = {m.id.split("/")[1]: m for m in batch.claims(rows)}
    assert set(found) == {c.id.split("/")[1] for c in claims_of("specter-batch")}
    ratio = (
        batch.curve(rows, "deepseek-nano", "specter")[batch.THROUGHPUT]
        / batch.curve(rows, "deepseek-nano", "specmoeoff")[batch.THROUGHPUT]
    )
    assert found["peak-throughput-ratio"].value == pytest.approx(ratio.max())
    assert f"B = {ratio.idxmax()}" in found["peak-throughput-ratio"].note
    assert found["tpot-inflation@qwen"].value > 1
    judge_all("specter-batch", found.values(), CPU)
    batch.plot(rows)


def test_batches_are_mixed_and_claims_need_their_models(papers_systems):
    traffic = offload.traffic("phi-nano", 0)
    sets = [traffic.requests.windows.prompt_set[request] for request in batch.in_turn(traffic)]
    assert sets == [*PROMPT_SETS, *PROMPT_SETS]
    rows = measured(batch, "phi-nano")
    assert {v.verdict for v in judge_all("specter-batch", batch.claims(rows), CPU)} == {NOT_RUN}


def test_what_stands_beside_a_tpot():
    policy, traffic = next(pair for pair in simulated.systems("qwen-nano", 0) if pair[0].id == "specter")
    done = simulate(traffic.requests, policy, offload.scene(traffic), new_tokens=TOKENS, requests=[3])
    beside = simulated.per_round([done], 24)
    tokens, depth = done.rounds.tokens, done.rounds.depth
    checked = sum(min(t, k) for t, k in zip(tokens, depth))
    assert beside["acceptance"] == pytest.approx(sum(tokens - 1) / checked, abs=1e-4)
    assert beside["simulated_h2d_mb_per_token"] == pytest.approx(
        done.rounds.h2d_bytes.sum() / tokens.sum() / 1e6, abs=0.01
    )
    assert beside["distinct_experts_per_layer"] == pytest.approx(
        done.hits.counts[serve.NEEDED] / len(tokens) / 24, abs=1e-3
    )
