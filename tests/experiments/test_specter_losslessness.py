"""specter-losslessness end to end on short texts and few samples."""

import pandas as pd
import pytest

from specter_lab.experiments.specter import losslessness, routing
from specter_lab.experiments.specter.losslessness import PARITY, RULE, WIDTH
from specter_lab.measure.prompts import PROMPT_SETS

QWEN = "qwen-nano"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def small(monkeypatch, cache):
    for name, value in {"NEW_TOKENS": 24, "DRAFT": "rtn-int4", "BATCH": 400, "CACHE": cache}.items():
        monkeypatch.setattr(losslessness, name, value)


def test_greedy_rows():
    digest = routing.inputs_digest(QWEN)
    rows = pd.DataFrame(losslessness.measure_parity(QWEN, digest, 0, "float32"))
    assert (rows["by"] == PARITY).all() and tuple(rows["item"]) == PROMPT_SETS
    assert (rows["equal_tokens"] == 24).all() and rows["margin"].isna().all()
    width = pd.DataFrame(losslessness.measure_rounding(QWEN, digest, 0, "float32"))
    assert (width["by"] == WIDTH).all()
    assert width["difference"].is_monotonic_increasing and 0 < width["difference"].iloc[-1] < 1e-3
    assert (width["flipped_tokens"] == 0).all() and width["n_tokens"].iloc[0] > 300


def test_sampled_rows_tell_a_wrong_rule_from_the_standard_one():
    digest = routing.inputs_digest(QWEN)
    standard, wrong = (
        losslessness.measure_sampled(QWEN, digest, 0, rule, "rtn-int2", 1.0, samples=600)[0]
        for rule in ("standard", "always accept")
    )
    assert (standard["n_samples"], wrong["n_samples"]) == (600, 600)
    assert standard["p_value"] > 0.01 > 1e-6 > wrong["p_value"]
    assert standard["total_variation_at_most"] < wrong["total_variation_at_most"]


def rows_of(equal_tokens, p_standard, p_wrong):
    parity = [
        {"by": PARITY, "model": QWEN, "precision": "bfloat16", "new_tokens": 512, "equal_tokens": n, "margin": 0.25}
        for n in equal_tokens
    ]
    tests = [{"by": RULE, "item": "standard", "model": QWEN, "n_samples": 1000, "p_value": p} for p in p_standard]
    return pd.DataFrame([*parity, *tests, {"by": RULE, "item": "no residual", "model": QWEN, "p_value": p_wrong}])


def test_claims():
    parity, sampling = losslessness.claims(rows_of([512, 256, 512], p_standard=[0.4, 0.02, 0.9], p_wrong=0.0))
    assert parity.value == pytest.approx(1280 / 1536) and parity.low < parity.value < parity.high == 1
    assert parity.note == "1 of 3 texts part, at margins up to 0.25"
    assert (sampling.value, sampling.n) == (pytest.approx(0.06), 3000)


def test_parity_that_never_fails_has_a_bound_and_no_interval():
    parity, _ = losslessness.claims(rows_of([512] * 15, p_standard=[0.4], p_wrong=0.0))
    assert (parity.value, parity.low, parity.high, parity.n) == (1, None, None, 15)
    assert parity.aside == "0 of 15 texts part: at most 18% of all texts would (95 %, one-sided, exact)"
    assert losslessness.none_of(1) == pytest.approx(0.95)
    assert (1 - losslessness.none_of(15)) ** 15 == pytest.approx(0.05)


def test_a_test_that_sees_nothing_proves_nothing():
    _, sampling = losslessness.claims(rows_of([512, 512], p_standard=[0.4], p_wrong=0.3))
    assert sampling.value is None and "does not see that 'no residual' is wrong" in sampling.note
