"""Verdicts, checked against the rules at the head of claims.toml."""

import pytest

from specter_lab.errors import UserError
from specter_lab.experiments import compare
from specter_lab.experiments.claims import (
    NOT_REPRODUCED,
    NOT_REPRODUCIBLE,
    NOT_RUN,
    REPRODUCED,
    TREND,
    Claim,
    Setting,
    judge,
    judge_all,
    read_claims,
    share_of_pairs_in_order,
)  # fmt: skip
from specter_lab.experiments.context import Measured
from specter_lab.experiments.registry import Experiment
from specter_lab.paths import CLAIMS

ZOO, PAPER = Setting("cpu"), Setting("paper", gpu="NVIDIA A100-SXM4-40GB")


def claim(kind, **fields):
    return Claim("e/c", "text", kind, "x", "S", **fields)


def verdict(of, value, setting=PAPER, **measured):
    return judge(of, Measured("e/c", value, **measured), setting).verdict


@pytest.mark.parametrize(
    "value, expected",
    [(0.90, REPRODUCED), (0.917, REPRODUCED), (0.92, TREND), (0.952, TREND), (0.96, NOT_REPRODUCED)],
)
def test_absolute(value, expected):
    assert verdict(claim("absolute", value=0.9, tolerance=0.02), value) == expected


@pytest.mark.parametrize(
    "value, expected", [(1.88, REPRODUCED), (1.6, REPRODUCED), (1.2, TREND), (5.0, TREND), (0.9, NOT_REPRODUCED)]
)
def test_ratio_above_one(value, expected):
    assert verdict(claim("ratio", value=1.88, tolerance=0.15), value) == expected


def test_ratio_below_one_has_its_trend_below_one():
    saving = claim("ratio", value=0.57, tolerance=0.03)
    assert [verdict(saving, value) for value in (0.56, 0.9, 1.1)] == [REPRODUCED, TREND, NOT_REPRODUCED]


def test_ordering():
    ordering = claim("ordering", tolerance=0.2)
    assert [verdict(ordering, value) for value in (1.0, 0.8, 0.7)] == [REPRODUCED, TREND, NOT_REPRODUCED]


def test_threshold_counts_the_interval():
    above = claim("threshold", at_least=0.9)
    assert verdict(above, 0.95, low=0.92, high=0.97) == REPRODUCED
    assert verdict(above, 0.95, low=0.89, high=0.97) == TREND
    assert verdict(above, 0.89, low=0.85, high=0.93) == NOT_REPRODUCED
    assert verdict(claim("threshold", at_most=0.15), 0.1, low=0.05, high=0.2) == TREND


def test_a_bound_that_holds_is_kept_within():
    below = claim("threshold", at_most=0.15)
    assert judge(below, Measured("e/c", 0.1), PAPER).why == "the value is within the bound"
    assert (
        judge(below, Measured("e/c", 0.1, low=0.05, high=0.12), PAPER).why == "the whole interval is within the bound"
    )
    assert judge(below, Measured("e/c", 0.2), PAPER).why == "the value is outside the bound"


def test_a_trend_of_a_large_factor_says_how_little_it_says():
    large = claim("ratio", value=4.78, tolerance=0.15)
    near, far = (judge(large, Measured("e/c", value), PAPER) for value in (6.0, 28.3))
    assert near.verdict == far.verdict == TREND
    assert near.why.endswith("same side of 1") and far.why.endswith("all that this trend says")


def test_shape_is_a_range_with_a_margin():
    shape = claim("shape", at_least=1.0, at_most=1.05, tolerance=0.05)
    assert [verdict(shape, value) for value in (1.03, 1.09, 0.96, 1.2)] == [REPRODUCED, TREND, TREND, NOT_REPRODUCED]


def test_zoo_and_own_models_cap_values_that_depend_on_weights():
    exact = claim("absolute", value=0.9, tolerance=0.02)
    assert verdict(exact, 0.9, ZOO) == TREND
    assert verdict(exact, 0.9, Setting("paper", own_models=True)) == TREND
    assert "zoo" in judge(exact, Measured("e/c", 0.9), ZOO).why
    assert verdict(claim("absolute", value=0.9, tolerance=0.02, any_weights=True), 0.9, ZOO) == REPRODUCED
    assert verdict(claim("threshold", at_least=0.9), 0.95, ZOO) == REPRODUCED
    assert verdict(exact, 0.5, ZOO) == NOT_REPRODUCED


def test_simulated_values_are_a_trend_at_best():
    threshold = claim("threshold", at_least=0.9, any_weights=True)
    assert verdict(threshold, 0.95, PAPER, simulated=True) == TREND
    assert verdict(threshold, 0.5, PAPER, simulated=True) == NOT_REPRODUCED


def test_times_count_on_the_same_class_of_gpu_only():
    tpot = claim("absolute", value=35.3, tolerance=0.15, gpu="A100")
    assert verdict(tpot, 36.0, PAPER) == REPRODUCED
    on_h200 = judge(tpot, Measured("e/c", 12.0), Setting("paper", gpu="NVIDIA H200"))
    assert (on_h200.verdict, on_h200.ours) == (NOT_RUN, 12.0) and "H200" in on_h200.why


@pytest.mark.parametrize("gpu", [None, "NVIDIA H200", "NVIDIA A100-SXM4-40GB"])
def test_a_simulated_time_is_no_measurement_on_any_machine(gpu):
    tpot = claim("absolute", value=35.3, tolerance=0.15, gpu="A100")
    found = judge(tpot, Measured("e/c", 47.0, simulated=True, note="steady 48 ms"), Setting("cpu", gpu=gpu))
    assert found.verdict == NOT_RUN and found.ours == 47.0
    assert (
        found.why == "simulated, not measured on an A100; 33.1% from the paper's value, tolerance 15.0%; steady 48 ms"
    )
    orin = judge(claim("ratio", value=2.0, tolerance=0.1, gpu="Orin"), Measured("e/c", 3.0, simulated=True), ZOO)
    assert "an Orin" in orin.why


def test_what_belongs_beside_a_value_stands_beside_it_in_the_readme(monkeypatch):
    ordering = claim("ordering", tolerance=0.2, headline=True)
    found = judge(ordering, Measured("e/c", 0.8, simulated=True, aside="A < B in 10%"), ZOO)
    monkeypatch.setattr(compare, "EXPERIMENTS", {"e": Experiment("e", "", "", "", "", {"cpu": 1})})
    monkeypatch.setattr(compare, "claims_of", lambda _: [ordering])
    monkeypatch.setattr(compare, "_verdicts", lambda *_: {"e/c": found})
    (ours,) = compare.headline_table()["ours"]
    assert ours == compare.in_unit(0.8, "x") + " (simulated); A < B in 10%"


def test_not_run_and_not_reproducible_say_why():
    known = claim("absolute", value=0.9, tolerance=0.02)
    assert judge(known, None, ZOO).verdict == NOT_RUN
    absent = judge(known, Measured("e/c", None, note="no .venv-autoawq: run make setup-autoawq"), ZOO)
    assert absent.verdict == NOT_RUN and "setup-autoawq" in absent.why
    assert judge(claim("absolute", missing="cells"), None, ZOO).verdict == NOT_REPRODUCIBLE


def test_a_value_without_a_claim_is_refused():
    with pytest.raises(ValueError, match="specter-table1/gguf-q3-mean"):
        judge_all("specter-table1", [Measured("specter-table1/gguf-q3-mean", 0.9)], ZOO)


def test_every_claim_of_an_experiment_gets_a_verdict():
    verdicts = judge_all("specter-table1", [Measured("specter-table1/gguf-q8-mean", 0.99, n=200)], ZOO)
    assert {v.id: v.verdict for v in verdicts} == {
        "specter-table1/gguf-q2-mean": NOT_RUN,
        "specter-table1/gguf-q8-mean": TREND,
        "specter-table1/gguf-ordering": NOT_RUN,
        "specter-table1/int4-above-90": NOT_RUN,
        "specter-table1/cells": NOT_REPRODUCIBLE,
    }


def test_not_a_number_is_not_a_measurement():
    with pytest.raises(ValueError, match="e/c"):
        Measured("e/c", float("nan"))


def test_share_of_pairs_in_order():
    assert share_of_pairs_in_order([1, 2, 2, 3]) == 1
    assert share_of_pairs_in_order([1, 3, 2]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError):
        share_of_pairs_in_order([1])


def test_series_become_one_claim_per_point():
    claims = read_claims(CLAIMS)
    assert claims["specter-hit-rate/specter@16"].value == 0.9985
    assert claims["elephants-table1/int4-optimised@32"].value == 1.85
    assert "DeepSeek, 24 GB" in claims["specter-hit-rate/lru@24"].text


@pytest.mark.parametrize(
    "entry, complaint",
    [
        ('kind = "exact"', "kind 'exact'"),
        ('kind = "absolute"\nvalue = 1.0', "tolerance"),
        ('kind = "ratio"\ntolerance = 0.1', "value"),
        ('kind = "threshold"', "at_least or at_most"),
    ],
)
def test_a_claim_that_cannot_be_judged_is_refused(tmp_path, entry, complaint):
    file = tmp_path / "claims.toml"
    file.write_text(f'[e.c]\ntext = "t"\nunit = "x"\nsource = "S"\n{entry}\n')
    with pytest.raises(UserError, match=complaint):
        read_claims(file)


def test_a_damaged_or_missing_file_is_one_sentence(tmp_path):
    file = tmp_path / "claims.toml"
    with pytest.raises(UserError, match="missing or damaged"):
        read_claims(file)
    file.write_text("[e.c")
    with pytest.raises(UserError, match="restore it"):
        read_claims(file)
