"""specter-depth end to end on a few prompts."""

import numpy as np
import pandas as pd
import pytest

from specter_lab.errors import UserError
from specter_lab.experiments.specter import depth, routing
from specter_lab.measure.acceptance import expected_accepted

QWEN = "qwen-nano"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def small(monkeypatch, cache):
    for name, value in {
        "PROMPTS_PER_SET": 2, "POOL_PER_SET": 12, "DEPTHS": (2, 8, 16, 32), "DRAFT": "rtn-int4", "SIDE_TOKENS": 8,
        "QUANTIZERS": ("rtn-int8", "rtn-int2"), "PREFIXES": (4, 64), "CACHE": cache,
    }.items():  # fmt: skip
        monkeypatch.setattr(depth, name, value)


@pytest.fixture
def rows():
    digest = routing.inputs_digest(QWEN)
    found = depth.measure_depths(QWEN, digest, 0, temperature=0.0, new_tokens=24)
    found += depth.measure_depths(QWEN, digest, 0, temperature=1.0, new_tokens=8)
    found += depth.measure_quantizers(QWEN, digest, 0) + depth.measure_prefixes(QWEN, digest, 0)
    return pd.DataFrame(found)


def test_rows_claims_and_figure(rows):
    greedy = depth.chosen(rows, depth.DEPTH)
    assert greedy["depth"].tolist() == [2, 8, 16, 32] and (greedy["n_requests"] == 30).all()
    assert (greedy["accepted_per_proposed"] <= greedy["accepted_per_checked"]).all()
    assert (greedy["accepted_per_checked_ci_low"] <= greedy["accepted_per_checked"]).all()
    assert greedy["tokens_per_round"].is_monotonic_increasing and greedy["distinct_experts"].is_monotonic_increasing
    np.testing.assert_allclose(
        greedy["expected_tokens_per_round"],
        [1 + expected_accepted(a, k) for a, k in zip(greedy["accepted_per_checked"], greedy["depth"])], atol=1e-3,
    )  # fmt: skip

    sets = depth.chosen(rows, depth.SET)
    assert sets["n_requests"].tolist() == [6] * 5 and sets["n_rounds"].sum() == greedy["n_rounds"].iloc[2]
    repeats = depth.chosen(rows, depth.REPEAT)
    assert repeats["n_requests"].tolist() == [10] * 3 and repeats["n_rounds"].sum() == greedy["n_rounds"].iloc[2]
    coarse = depth.chosen(rows, depth.QUANTIZER).set_index("item")["accepted_per_checked"]
    assert coarse["rtn-int2"] < coarse["rtn-int8"]

    tpot = depth.chosen(rows, depth.TPOT, budget="high").pivot(
        index="depth", columns="definition", values="simulated_tpot_ms"
    )
    assert (tpot["paper"] < tpot["decode"]).all(), "the first round is free in the paper's formula"
    best = depth.chosen(rows, depth.BEST, budget="high").set_index("item")["depth"]
    assert best.to_dict() == tpot.idxmin().to_dict()

    measured = {m.id.split("/")[1]: m for m in depth.claims(rows)}
    assert measured["acceptance"].value == greedy["accepted_per_checked"].iloc[2]
    sampled = depth.chosen(rows, depth.DEPTH, 1.0, depth=16)["accepted_per_checked"].iloc[0]
    assert f"sampled at T = 1, without loops, {sampled:.1%}" in measured["acceptance"].note
    assert measured["expected-accepted@8"].value == pytest.approx(greedy["tokens_per_round"].iloc[1] - 1)
    assert measured["best-depth@qwen"].simulated and measured["best-depth@qwen"].value == best["paper"]
    assert measured["best-depth@phi"].value is None and "no phi model" in measured["best-depth@phi"].note
    assert len(depth.plot(rows).axes) == 6


def test_every_prompt_is_as_long_as_its_prefix():
    question = routing.ask(QWEN, depth.POOL_PER_SET, 0)
    prompts, sets = depth.prompts_of(question, 64)
    assert prompts.shape == (30, 64) and (np.unique(sets, return_counts=True)[1] == 6).all()
    shorter, _ = depth.prompts_of(question, 16)
    assert shorter.shape == (30, 16)


def test_too_few_long_prompts(monkeypatch):
    monkeypatch.setattr(depth, "PROMPTS_PER_SET", 5)
    with pytest.raises(
        UserError, match="only 12 of 12 prompts of 'mathematics' have 16 tokens for qwen-nano, 15 are needed"
    ):
        depth.prompts_of(routing.ask(QWEN, depth.POOL_PER_SET, 0), 16)
