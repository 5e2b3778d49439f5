"""The routing experiments, end to end on a few requests, and what their recorded results must contain."""

import numpy as np
import pandas as pd
import pytest

from specter_lab import paths
from specter_lab.experiments import results
from specter_lab.experiments.context import Context
from specter_lab.experiments.specter import activation_entropy, routing, routing_match, table1
from specter_lab.measure import fidelity

QWEN = "qwen-nano"
TABLE1_COLUMNS = {
    "model", "quantizer", "bits_per_weight", "overlap_mean", "set_match_mean", "ordered_match_mean", "overlap_ci_low",
    "overlap_ci_high", "n_requests", "n_tokens", "protocol",
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_requests(monkeypatch, tmp_path):
    for module in (table1, routing_match, activation_entropy):
        monkeypatch.setattr(module, "REQUESTS_PER_SET", 2)
        monkeypatch.setattr(module, "CACHE", tmp_path)
    monkeypatch.setattr(routing_match, "DRAFT", "rtn-int4")  # the control quantiser: nothing to calibrate


def test_the_longest_model_runs_first_and_rows_are_in_the_order_of_the_models(monkeypatch):
    ran = []

    def run(context, jobs):
        ran.extend(job.arguments["model"] for job in jobs)
        return [{"model": job.arguments["model"], "row": row} for job in jobs for row in (0, 1)]

    monkeypatch.setattr(routing.jobs, "run", run)
    models = ("phi-nano", "deepseek-nano", QWEN)
    rows = routing.rows_per_model(Context("specter-tpot", "cpu", 0, models, False), activation_entropy.measure)
    assert ran == ["deepseek-nano", QWEN, "phi-nano"]
    assert rows["model"].tolist() == [model for model in models for _ in (0, 1)] and rows["row"].tolist() == [0, 1] * 3


def test_table1_rows_of_one_quantiser():
    rows = pd.DataFrame(table1.measure(QWEN, routing.inputs_digest(QWEN), "rtn-int4", seed=0, not_run=None))
    assert TABLE1_COLUMNS <= set(rows.columns)
    for protocol in (table1.TEACHER_FORCED, table1.FREE_RUNNING):
        part = rows[rows["protocol"] == protocol].set_index("prompt_set")
        assert part.loc["all", "n_tokens"] == part.drop("all")["n_tokens"].sum()
        assert part.loc["all", "n_requests"] == 10
        assert (part["overlap_ci_low"] <= part["overlap_mean"]).all()
        assert (part["overlap_mean"] <= part["overlap_ci_high"]).all()
        assert (part["ordered_match_mean"] <= part["set_match_mean"]).all()
        assert (part["set_match_mean"] <= part["overlap_mean"]).all()
    assert 0.9 < rows["overlap_mean"].min() < 1


def test_table1_same_seed_same_rows_other_seed_other_requests():
    digest = routing.inputs_digest(QWEN)
    first, again, other = (table1.measure(QWEN, digest, "rtn-int2", seed, None) for seed in (0, 0, 1))
    assert first == again and first != other


def test_a_quantiser_that_is_not_here_is_a_row_that_says_so():
    (row,) = table1.measure(QWEN, "", "autoawq-int4", seed=0, not_run="not run: not installed")
    assert row["status"] == "not run: not installed" and "overlap_mean" not in row


def test_routing_match_distributions_agree_with_the_means():
    rows = pd.DataFrame(routing_match.measure(QWEN, routing.inputs_digest(QWEN), seed=0))
    instances = rows[rows["level"] == "instance"]
    mean = rows[(rows["level"] == "mean") & (rows["protocol"] == routing_match.TEACHER_FORCED)].set_index("quantity")[
        "value"
    ]
    assert np.average(instances["value"], weights=instances["n"]) == pytest.approx(mean["overlap"], abs=3e-3)  # bins
    assert rows[rows["level"] == "layer"]["n"].sum() == 10 * 4
    assert mean["set_match"] == pytest.approx(mean["ordered_match"] + mean["same set, other order"], abs=1e-5)
    assert rows[rows["level"] == "request"]["n"].sum() == 10
    assert rows[rows["level"] == "layer mean"]["value"].iloc[0] == 1  # nothing quantised lies below the first MoE layer


def test_entropy_counts_every_token_once_per_slot():
    rows = pd.DataFrame(activation_entropy.measure(QWEN, routing.inputs_digest(QWEN), seed=0))
    used = rows[rows["prompt_set"] == "all"].groupby("layer")["activations"].sum()
    assert (used == 4 * rows["n_tokens"].max()).all()


@pytest.mark.parametrize(
    "experiment, module",
    [
        ("specter-table1", table1),
        ("specter-routing-match", routing_match),
        ("specter-activation-entropy", activation_entropy),
    ],
)
def test_recorded_rows_give_the_recorded_verdicts(experiment, module):
    recorded = results.read(experiment, "cpu", paths.RECORDED)
    assert recorded is not None and (recorded.folder / "notebook.ipynb").exists()
    verdicts = {verdict.id: verdict for verdict in recorded.verdicts}
    for measured in module.claims(recorded.rows):
        assert measured.value == pytest.approx(verdicts[measured.id].ours), measured.id


def test_recorded_table1_is_whole():
    rows = results.read("specter-table1", "cpu", paths.RECORDED).rows
    ran = table1.summary(rows)
    assert TABLE1_COLUMNS <= set(rows.columns)
    assert set(ran["model"]) == {"qwen-nano", "phi-nano", "deepseek-nano"}
    assert ran.groupby("model")["quantizer"].nunique().min() >= 14
    assert ran["n_requests"].min() >= 200
    assert set(rows["protocol"]) == {table1.TEACHER_FORCED, table1.FREE_RUNNING}
    assert ran["overlap_mean"].between(0, 1).all() and set(fidelity.DEFINITIONS) <= {
        c.removesuffix("_mean") for c in rows
    }
