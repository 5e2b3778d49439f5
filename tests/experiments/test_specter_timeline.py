"""specter-timeline and specter-calibration on made-up recordings."""

import gzip
import json
import math

import numpy as np
import pandas as pd
import pytest

from specter_lab.experiments import registry, results
from specter_lab.experiments.claims import REPRODUCED, Setting, judge_all
from specter_lab.experiments.run import run
from specter_lab.experiments.specter import (
    batch,
    calibration,
    calibration_cells,
    offload,
    timeline,
    timeline_figure,
    tpot,
)
from specter_lab.experiments.specter.calibration_cells import Cell, Fitted, FittedCosts, Setup
from specter_lab.plan.hardware import read_profile
from specter_lab.plan.policies import find_policy
from specter_lab.plan.simulate import simulate
from specter_lab.plan.step_costs import StepCosts
from specter_lab.plan.streams import WORK_NAMES
from tests.experiments import made_up

CPU = Setting("cpu")
QWEN, MODELS = "qwen-nano", ("qwen-nano", "phi-nano", "deepseek-nano")


@pytest.fixture(autouse=True)
def recordings(monkeypatch):
    made_up.use(monkeypatch)
    monkeypatch.setattr(timeline, "NEW_TOKENS", made_up.POSITIONS)
    monkeypatch.setattr(calibration_cells, "NEW_TOKENS", made_up.POSITIONS)
    monkeypatch.setattr(calibration_cells, "BATCH", 4)


@pytest.fixture
def round_rows():
    return pd.DataFrame(timeline.measure(QWEN, "", 0))


def test_a_round_is_whole_and_adds_up(round_rows):
    for mode, policy in timeline.MODES.items():
        found = timeline.of_round(round_rows, QWEN, mode)
        accept = found[found["work"] == timeline.ACCEPT].iloc[0]
        assert (found["work"] == "draft step").sum() == accept["depth"] == 8
        assert accept["committed"] + accept["rolled_back"] == 9 and accept["rolled_back"] > 0
        assert found["simulated_start_ms"].min() == 0
        assert found["simulated_end_ms"].max() == accept["simulated_end_ms"]
        for _, lane in found.groupby("stream"):
            lane = lane.sort_values("simulated_start_ms")
            ends, starts = lane["simulated_end_ms"].to_numpy()[:-1], lane["simulated_start_ms"].to_numpy()[1:]
            assert (starts >= ends - 2e-4).all(), "two pieces of work at once on one stream"
        traffic = offload.traffic(QWEN, 0)
        again = simulate(
            traffic.requests, find_policy(policy), offload.scene(traffic), new_tokens=timeline.NEW_TOKENS,
            requests=timeline.REQUESTS,
        ).rounds  # fmt: skip
        number = int(found["round"].iloc[0])
        assert accept["simulated_end_ms"] == pytest.approx(again.end_ms[number] - again.start_ms[number], abs=1e-3)
        copies = found["stream"] == "H2D"
        bytes_moved = copies.sum() * offload.scene(traffic).costs.expert_bytes
        assert bytes_moved == again.h2d_bytes[number]


def test_events_in_order_and_out_of_order(round_rows):
    paper = timeline.of_round(round_rows, QWEN, "paper mode")
    assert timeline.pairs_in_order(paper) == (15, 15)
    late = paper.copy()
    late.loc[late["work"] == "prefetch", ["simulated_start_ms", "simulated_end_ms"]] += 1e6  # copies after everything
    assert timeline.pairs_in_order(late) == (15 - 3 - 2, 15)
    without = paper[paper["work"] != "prefetch"]
    assert timeline.pairs_in_order(without) == (6, 15), "an event that never happened is in no order"


def test_timeline_claim_is_a_trend_at_best(round_rows):
    (verdict,) = judge_all("specter-timeline", timeline.claims(round_rows), CPU)
    assert verdict.ours == 1 and verdict.verdict == "trend" and "fast mode" in verdict.why
    figure = timeline.plot(round_rows)
    assert len(figure.axes) == 4
    named = {text.get_text() for text in figure.legends[0].get_texts()}
    assert "draft ends, verification begins, round ends" in named


def test_work_and_streams_that_are_new_are_drawn_and_named(round_rows):
    other = round_rows.iloc[[3]].assign(stream="disk", work="tea break")
    figure = timeline.plot(pd.concat([round_rows, other]))
    assert "tea break" in {text.get_text() for text in figure.legends[0].get_texts()}
    lanes = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert lanes[0] == "disk" and lanes[-2:] == ["H2D", "compute"]
    assert set(timeline_figure.COLORS) >= set(WORK_NAMES) - {timeline.ACCEPT}
    colors = timeline_figure.work_colors(pd.concat([round_rows, other]))
    assert colors["tea break"] not in timeline_figure.COLORS.values() and timeline.ACCEPT not in colors


def test_the_trace_has_every_piece_of_work(round_rows):
    (content,) = timeline.files(round_rows).values()
    assert content == timeline.files(round_rows)[timeline.TRACE] and len(content) < 200_000
    events = json.loads(gzip.decompress(content))["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    assert len(work) == len(round_rows) and {event["pid"] for event in work} == {0, 1}
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"qwen-nano, paper mode, SIMULATED", "qwen-nano, fast mode, SIMULATED"}


def test_a_result_keeps_the_trace_beside_its_rows(out, monkeypatch):
    from specter_lab.experiments import jobs

    monkeypatch.setattr(
        jobs, "run", lambda context, work: [row for job in work for row in job.function(**job.arguments)]
    )
    result = run("specter-timeline", models=[QWEN])
    assert (result.folder / timeline.TRACE).read_bytes() == timeline.files(result.rows)[timeline.TRACE]
    assert timeline.TRACE in result.provenance["files"]
    (result.folder / timeline.TRACE).write_bytes(b"")
    assert results.read("specter-timeline", result.tier, result.folder.parents[1]) is None, "an altered trace is seen"


def test_cells_are_many_and_half_of_each_experiment_is_fitted():
    listed = calibration_cells.cells()
    half = calibration_cells.fitted_half(listed)
    assert len(listed) == 47 and {cell.experiment for cell in listed} <= set(registry.EXPERIMENTS) | {
        "specter-tpot", "specter-batch", "specter-hit-rate", "specter-io-hiding"
    }  # fmt: skip
    for experiment in {cell.experiment for cell in listed}:
        mine = [fitted for cell, fitted in zip(listed, half) if cell.experiment == experiment]
        assert sum(mine) == math.ceil(len(mine) / 2)


def test_fitted_costs_change_what_they_say_and_nothing_else():
    traffic = offload.traffic(QWEN, 0)
    plain = offload.scene(traffic).costs
    same = FittedCosts(plain.model, plain.profile, plain.fused, plain.context_tokens)
    assert same.of_pass(9) == plain.of_pass(9) and same.copy_ms == plain.copy_ms
    costs = FittedCosts(
        plain.model, plain.profile, plain.fused, plain.context_tokens, demand_share=0.5, prefetch_share=0.8
    )
    assert costs.copy_ms == pytest.approx(plain.copy_ms / 0.8)
    assert costs.of_pass(9).copy_ms == pytest.approx(plain.copy_ms / 0.5)
    assert costs.of_pass(9)._replace(copy_ms=0, read_through_ms=0) == plain.of_pass(9)._replace(
        copy_ms=0, read_through_ms=0
    )
    assert isinstance(costs, StepCosts) and costs.draft_step_ms == plain.draft_step_ms


def test_with_nothing_fitted_a_cell_is_what_the_simulator_says():
    traffic, profile = offload.traffic("deepseek-nano", 0), read_profile()
    setup = Setup("deepseek", "specter")
    ours = calibration_cells.run_setup(setup, traffic, profile, Fitted(profile.launch_us, 1.0, 1.0), 0, None)
    plain = simulate(traffic.requests, find_policy("specter"), offload.scene(traffic), new_tokens=made_up.POSITIONS)
    cell = Cell("", "", calibration_cells.TPOT, 1.0, setup)
    assert sorted(ours.commits) == sorted(plain.commits)
    assert calibration_cells.read_off(cell, ours) == pytest.approx(plain.tpot_ms(made_up.POSITIONS)["paper"], rel=0.03)
    slow = calibration_cells.run_setup(setup, traffic, profile, Fitted(5 * profile.launch_us, 0.5, 0.5), 0, None)
    assert calibration_cells.read_off(cell, slow) > 1.5 * calibration_cells.read_off(cell, ours)


def test_the_search_finds_a_known_minimum():
    wanted = Fitted(23.0, 0.4, 0.9)

    def loss(guess: Fitted) -> float:
        return sum(abs(math.log(getattr(guess, name) / getattr(wanted, name))) for name in calibration.LIMITS)

    found, tried = calibration.search(loss, Fitted(10.0, 1.0, 1.0))
    assert loss(found) < 0.15 and tried < 100
    for name, (low, high) in calibration.LIMITS.items():
        assert low <= getattr(found, name) <= high


def test_a_system_is_the_same_in_every_table(monkeypatch):
    """One name, one number: Transformers at one request in specter-tpot, at many in specter-batch, and as cells here."""
    monkeypatch.setattr(batch, "BATCHES", (1, 4))
    traffic, profile = offload.traffic("deepseek-nano", 0), read_profile()
    where = offload.scene(traffic)
    as_it_is = Fitted(profile.launch_us, 1.0, 1.0)
    one, four = (
        calibration_cells.run_setup(Setup("deepseek", "transformers", batch=size), traffic, profile, as_it_is, 0, None)
        for size in (1, 4)
    )
    (tpot_row, *_) = tpot.layer_offload_rows("deepseek-nano", "high", where, [])
    assert tpot_row["system"] == "transformers" and tpot_row["simulated_tpot_paper_ms"] == pytest.approx(one, abs=1e-3)
    plain = batch.batch_row(find_policy("lru"), traffic, where, 4)
    batch_row = batch.layer_offload_row(where, 4, plain[batch.WORKING_SET], 24 * 10**9)
    assert batch_row[batch.REQUEST_CLOCK] == pytest.approx(four, rel=1e-3) and four >= one


def test_what_pinned_memory_would_change_is_stated(monkeypatch):
    monkeypatch.setattr(calibration, "LAST_STEP", calibration.FIRST_STEP)  # no fit
    rows = pd.DataFrame(calibration.measure_all(MODELS, [], 0))
    transformers = rows["name"].str.contains("transformers") & rows["experiment"].isin(
        ["specter-tpot", "specter-batch"]
    )
    of_cells = rows[transformers & (rows["row"] == calibration.CELL)].set_index(["experiment", "name", "quantity"])
    pinned = rows[rows["row"] == calibration.IF_PINNED].set_index(["experiment", "name", "quantity"])
    assert len(pinned) == 5 and set(pinned.index) == set(of_cells.index)
    faster = pinned["simulated_uncalibrated"] < of_cells.loc[pinned.index, "simulated_uncalibrated"]
    assert (faster == (pinned.index.get_level_values("quantity") == calibration_cells.TPOT)).all()
    assert len(calibration.errors(rows, None)) == len(calibration.errors(rows, None, pinned=True)) == 47
    notes = {m.id.split("/")[1]: m.note for m in calibration.claims(rows)}
    median = np.median(calibration.errors(rows, None, "error_uncalibrated", pinned=True))
    assert notes["uncalibrated-error"] == f"with Transformers in pinned memory {median:.0%}"


def test_misfit_counts_both_sides_alike_and_is_capped():
    assert calibration.misfit(np.array([0.5]), np.array([1.0])) == calibration.misfit(np.array([2.0]), np.array([1.0]))
    assert calibration.misfit(np.array([1e6, 1.0]), np.array([1.0, 1.0])) == pytest.approx(math.log(4) / 2)


def test_calibration_recovers_numbers_it_made_itself(monkeypatch):
    """Cells whose "paper" values come from the simulator with other numbers: fitting half of them must explain the rest."""
    truth, profile = Fitted(40.0, 0.5, 0.5), read_profile()
    traffic = {model.split("-")[0]: offload.traffic(model, 0) for model in MODELS}
    setups = [Setup(family, system) for family in traffic for system in ("specter", "lru", "lru-s", "specmoeoff")]
    made = []
    for setup in setups:
        done = calibration_cells.run_setup(setup, traffic[setup.family], profile, truth, 0, 2)
        cell = Cell("specter-tpot", f"{setup.family}, {setup.system}", calibration_cells.TPOT, 0.0, setup)
        made.append(calibration_cells.replace(cell, paper=calibration_cells.read_off(cell, done)))
    monkeypatch.setattr(calibration, "cells", lambda: made)
    rows = pd.DataFrame(calibration.measure_all(MODELS, [], 0))
    assert (
        np.median(calibration.errors(rows, "held out"))
        < 0.1
        < np.median(calibration.errors(rows, None, "error_uncalibrated"))
    )
    assert calibration.constants(rows)["launch_us"] == pytest.approx(40, rel=0.3)
    found = {m.id.split("/")[1]: m for m in calibration.claims(rows)}
    assert found["held-out-error"].value == pytest.approx(np.median(calibration.errors(rows, "held out")))
    assert found["fit-generalises"].value < 1 and found["held-out-error"].n == len(made) / 2
    verdicts = judge_all("specter-calibration", found.values(), CPU)
    assert len(verdicts) == 4 and all(verdict.verdict != REPRODUCED for verdict in verdicts)
    assert set(rows.loc[rows["row"] == calibration.FACTOR, "name"]) >= {"qwen, lru over qwen, specter"}
    calibration.plot(rows)


def test_calibration_of_one_model_leaves_the_others_cells_empty(monkeypatch):
    monkeypatch.setattr(calibration, "LAST_STEP", calibration.FIRST_STEP)  # no fit
    rows = pd.DataFrame(calibration.measure_all([QWEN], [], 0))
    cells = rows[rows["row"] == calibration.CELL]
    assert len(cells) == 47 and cells["simulated_uncalibrated"].notna().sum() == 7
    assert cells.loc[cells["simulated_uncalibrated"].notna(), "name"].str.startswith("qwen").all()
    judge_all("specter-calibration", calibration.claims(rows), CPU)
    calibration.plot(rows)
