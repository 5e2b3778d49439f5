"""Explosion, memory, dense against MoE and latency breakdown, end to end on a few requests."""

import json

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from specter_lab.errors import UserError
from specter_lab.experiments.claims import NOT_REPRODUCED, REPRODUCED, Setting, judge_all
from specter_lab.experiments.run import context_for
from specter_lab.experiments.specter import dense_vs_moe, expert_explosion, latency_breakdown, memory, routing
from specter_lab.experiments.specter.setting import DENSE, priced_as, slots_of
from specter_lab.measure import prompts
from specter_lab.measure.trace import HEADER_KEY
from specter_lab.models.anatomy import anatomy_of
from specter_lab.models.geometry import GEOMETRY
from tests.models.foreign import CONFIGS

CPU = Setting("cpu")


@pytest.fixture(autouse=True)
def few_requests(monkeypatch, tmp_path):
    routing.ask.cache_clear()
    for module, requests in ((expert_explosion, 2), (latency_breakdown, 2), (dense_vs_moe, 1)):
        monkeypatch.setattr(module, "REQUESTS_PER_SET", requests)
        monkeypatch.setattr(module, "CACHE", tmp_path)
    monkeypatch.setattr(routing, "NEW_TOKENS", 64)
    monkeypatch.setattr(dense_vs_moe, "NEW_TOKENS", 12)
    monkeypatch.setattr(dense_vs_moe, "DRAFT", "rtn-int4")
    monkeypatch.setattr(dense_vs_moe, "DEPTHS", (2, 4, 8))
    monkeypatch.setattr(dense_vs_moe, "HALF", 4)


def measured(module, model):
    return pd.DataFrame(module.measure(model, routing.inputs_digest(model), seed=0))


def test_explosion_curves_and_claims():
    rows = measured(expert_explosion, "deepseek-nano")
    assert set(rows["phase"]) == {"prefill", "decode, greedy", "decode, sampled"}
    for phase in set(rows["phase"]):
        curve = expert_explosion.curve(rows, "deepseek-nano", phase)
        assert list(curve.index) == list(range(1, 33))
        assert curve["value"].iloc[0] == 6 and curve["value"].is_monotonic_increasing
        assert (curve["value"].iloc[1:] < curve["uniform_routing"].iloc[1:]).all()
        assert (curve["ci_low"] <= curve["value"]).all() and (curve["value"] <= curve["ci_high"]).all()
        near = expert_explosion.curve(rows, "deepseek-nano", phase, expert_explosion.DISTANCE)
        assert near["value"].is_monotonic_increasing and near["value"].between(0, 1).all()
    found = {m.id.split("/")[1]: m for m in expert_explosion.claims(rows)}
    sampled = expert_explosion.curve(rows, "deepseek-nano", expert_explosion.SAMPLED)["value"]
    assert found["distinct-experts@16"].value == sampled[16]
    assert found["distinct-experts@1"].value == 6 and found["distinct-experts@1"].low is None  # not a sample
    assert found["growth"].value == pytest.approx(sampled[16] / 6)
    assert len(judge_all("specter-expert-explosion", found.values(), CPU)) == 4
    expert_explosion.plot(rows)


def test_explosion_without_the_claims_model():
    rows = measured(expert_explosion, "phi-nano")
    assert all(m.value is None and "no deepseek model" in m.note for m in expert_explosion.claims(rows))
    expert_explosion.plot(rows)


def test_memory_reproduces_every_number_of_the_paper(out):
    rows = memory.run(context_for("specter-memory", tier="paper", seed=0))
    verdicts = judge_all("specter-memory", memory.claims(rows), CPU)
    assert {verdict.verdict for verdict in verdicts} == {REPRODUCED}
    left = memory.remaining(rows)
    assert (left.loc[memory.TOP_K] < left.loc[memory.POOL]).all()  # the paper's accounting flatters, for every model
    assert left.loc[memory.TOP_K, memory.QWEN] == pytest.approx(0.573, abs=0.001)


def test_memory_of_any_model_by_its_config_alone(tmp_path, out):
    CONFIGS["olmoe"].save_pretrained(tmp_path / "mine")
    rows = memory.run(context_for("specter-memory", tier="cpu", seed=0, models=[str(tmp_path / "mine")]))
    mine = memory.table(rows, "mine", memory.ALL)
    anatomy = anatomy_of(str(tmp_path / "mine"))
    assert mine.loc["independent", "target"] * 2**30 == 2 * anatomy.parameters + 12288 * anatomy.kv_bytes_per_token
    assert not rows["model"].str.contains(str(tmp_path)).any()
    memory.plot(rows)


def test_memory_counts_what_a_zoo_model_allocates():
    rows = pd.DataFrame(memory.allocate("deepseek-nano", ""))
    wide = rows.pivot(index="level", columns="source", values="total_bytes")
    routers = anatomy_of("deepseek-nano").routers
    extra = (wide[memory.ALLOCATED] - wide[memory.COUNTED]) / (2 * routers)  # DeepSeek's stay in float32
    assert extra.to_dict() == {"independent": 2, "+ shared experts": 2, "+ other parameters": 1, "+ KV cache": 1}


def test_dense_gains_its_tokens_and_the_moe_less():
    rows = pd.concat([measured(dense_vs_moe, name) for name in (DENSE, "qwen-nano")])
    dense, moe = (dense_vs_moe.curve(rows, name, dense_vs_moe.TARGET) for name in (DENSE, "qwen-nano"))
    assert list(dense.index) == [0, 2, 4, 8]
    assert dense["simulated_value"].to_numpy() == pytest.approx(dense["tokens_per_round"].to_numpy(), rel=1e-2)
    assert (moe["simulated_value"].iloc[1:] < dense["simulated_value"].iloc[1:]).all()
    assert moe["distinct_experts"].is_monotonic_increasing and moe["distinct_experts"].iloc[0] == 4
    assert (moe["resident_experts"] <= np.minimum(moe["distinct_experts"], 15)).all()
    linear, saturates = dense_vs_moe.claims(rows)
    of_dense, of_moe = (
        dense_vs_moe.shapes(rows).loc[where, "simulated_value"]
        for where in ((dense_vs_moe.STRAIGHTNESS, DENSE), (dense_vs_moe.SLOPES, "qwen-nano"))
    )
    assert set(of_moe.index) == {"high", "low"}
    assert linear.value == of_dense.min() and saturates.value == of_moe.max()  # the worse of both budgets
    assert f"{of_moe.idxmax()} budget, the worse of the two" in saturates.note
    verdicts = judge_all("specter-dense-vs-moe", dense_vs_moe.claims(rows), CPU)
    assert all(verdict.simulated and verdict.verdict != REPRODUCED for verdict in verdicts)  # never more than a trend
    dense_vs_moe.plot(rows)


def test_shape_numbers(monkeypatch):
    monkeypatch.setattr(dense_vs_moe, "DEPTHS", (4, 8, 12, 16))
    monkeypatch.setattr(dense_vs_moe, "HALF", 8)
    line, kink = [1, 3, 5, 7, 9], [1, 3, 5, 5.5, 6]
    assert dense_vs_moe.straightness(np.array([line])) == pytest.approx(1)
    assert dense_vs_moe.slope_ratio(np.array([line, kink])) == pytest.approx([1, 0.25])
    assert dense_vs_moe.straightness(np.array([kink]))[0] == pytest.approx(
        np.corrcoef([0, 4, 8, 12, 16], kink)[0, 1] ** 2
    )


def test_latency_breakdown_adds_up(out):
    mine = measured(latency_breakdown, "qwen-nano")
    times = mine[list(latency_breakdown.PARTS)]
    shares = times.div(times.sum(axis=1), axis=0)
    assert mine["simulated_kernels_share"].to_numpy() == pytest.approx(
        shares["simulated_kernels_ms"].to_numpy(), abs=1e-4
    )
    all_but_copies = 1 - shares["simulated_h2d_ms"]
    assert mine["simulated_compute_share"].to_numpy() == pytest.approx(all_but_copies.to_numpy(), abs=1e-4)
    by_cache = mine.set_index("cache")["missed_experts_per_layer"]
    assert by_cache["no cache"] == 4 > by_cache["LRU, low budget"] > by_cache["LRU, high budget"] > 0
    row = mine.set_index("cache").loc["LRU, high budget"]
    assert row["missed_ci_low"] < row["missed_experts_per_layer"] < row["missed_ci_high"]
    expected = row["missed_experts_per_layer"] * 24 * GEOMETRY["Qwen1.5-MoE-A2.7B"].expert_bytes / 1e9
    assert row["h2d_gb_per_token"] == pytest.approx(expected, abs=1e-3)


def test_a_dense_model_has_nothing_to_cache():
    with pytest.raises(UserError, match="dense-nano has one expert per layer"):
        measured(latency_breakdown, DENSE)


def test_latency_breakdown_counts_all_time_but_copies(monkeypatch):
    monkeypatch.setattr(routing, "rows_per_model", lambda context, measure: measured(latency_breakdown, "qwen-nano"))
    rows = latency_breakdown.run(context=None)
    share, mixtral = judge_all("specter-latency-breakdown", latency_breakdown.claims(rows), CPU)
    assert share.simulated and share.ours > 0.15 and share.verdict == NOT_REPRODUCED
    assert "GPU kernels alone are 6" in share.why
    assert mixtral.ours == pytest.approx(0.989, abs=0.01) and mixtral.verdict == "not run"
    latency_breakdown.plot(rows)


def test_zoo_models_are_priced_as_their_originals():
    assert priced_as("qwen-nano") is anatomy_of("Qwen1.5-MoE-A2.7B")
    dense, qwen = priced_as(DENSE), priced_as("qwen-nano")
    assert dense.num_experts == 1
    assert dense.active_parameters == pytest.approx(qwen.active_parameters, rel=2e-3)  # but for the routers
    assert slots_of("phi-nano", "phi") == slots_of("microsoft/Phi-3.5-MoE-instruct", "phi") == {"high": 2, "low": 1}
    assert slots_of(DENSE, "qwen")["high"] == 15 / 60


def test_a_kept_trace_of_another_schema_version(tmp_path):
    question = routing.ask("phi-nano", 1, 0)
    routing.decode_trace(question, tmp_path, 0.0)
    (path,) = (tmp_path / "traces").glob("*.parquet")
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[HEADER_KEY]) | {"schema_version": 99}
    pq.write_table(table.replace_schema_metadata({HEADER_KEY: json.dumps(header)}), path)
    before = path.read_bytes()
    with pytest.raises(UserError, match="schema version 99, this program reads 1: delete it and capture it again"):
        routing.decode_trace(question, tmp_path, 0.0)
    assert path.read_bytes() == before


def test_prompts_that_do_not_fit_or_are_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(routing, "NEW_TOKENS", 4096)
    with pytest.raises(UserError, match="needs 4128 positions, the model has 2048"):
        routing.decode_trace(routing.ask("phi-nano", 1, 0), tmp_path, 0.0)
    monkeypatch.setattr(routing, "PREFIX_TOKENS", 1000)
    with pytest.raises(UserError, match="no request has the 1000 tokens a continuation starts from"):
        routing.decode_trace(routing.ask("phi-nano", 1, 0), tmp_path, 0.0)
    assert not (tmp_path / "traces").exists()
    for name in prompts.PROMPT_SETS:
        (tmp_path / f"{name}.jsonl").write_text("\n")
    with pytest.raises(UserError, match="mathematics.jsonl holds no prompts"):
        prompts.select(1, folder=tmp_path)
