"""elephants-batch-pruning: one setting on a tiny model, the byte count, claims and figure."""

import numpy as np
import pandas as pd
import pytest

from specter_lab.errors import UserError
from specter_lab.experiments import run
from specter_lab.experiments.claims import TREND, Setting, judge_all
from specter_lab.experiments.elephants import batch_pruning
from specter_lab.models.switch import ELEPHANTS
from tests.experiments.test_elephants_table2 import folder  # noqa: F401


def made_up():
    return pd.DataFrame([
        {"kind": batch_pruning.SIMULATED, "model": "m", "direction": direction, "batch": batch, "order": order, "batches": 10,
         "length_cv": 0.5 if order == batch_pruning.AS_THEY_COME else 0.1, "loads_kept_share": 0.7, "speedup": 1 + batch / 800 + 0.5 * (order == batch_pruning.BY_LENGTH),
         "speedup_low": 1.0, "speedup_high": 1.3, "equal_translations_share": 1.0}
        for direction in ("en-de", "de-en") for batch in batch_pruning.BATCHES for order in batch_pruning.ORDERS
    ])  # fmt: skip


def test_one_setting_is_measured(folder, monkeypatch):  # noqa: F811
    monkeypatch.setattr(batch_pruning, "MAX_TOKENS", 8)
    (row,) = batch_pruning.measure(folder, "", "en-de", 4, batch_pruning.AS_THEY_COME, sentences_used=12, seed=0)
    assert row["batches"] == 3 and row["equal_translations_share"] == 1.0
    assert row["experts_per_step_pruned"] <= row["experts_per_step"] <= 4
    assert row["speedup"] >= 1 and 0 < row["loads_kept_share"] <= 1


def test_step_bytes_are_those_of_the_geometry():
    """32 experts in every sparse layer: the whole decoder but the cross keys and values, twice two bytes a weight."""
    whole = batch_pruning.step_bytes(ELEPHANTS, np.array([0.0, 32.0]))
    assert whole[1] - whole[0] == 2 * 6 * 32 * 2 * 1024 * 4096
    assert whole[0] == 2 * (12 * 6 * 1024**2 + 6 * 2 * 1024 * 4096 + 128_000 * 1024)


def test_the_claim_is_the_most_among_unsorted_batches():
    rows = made_up()
    (found,) = batch_pruning.claims(rows)
    assert found.value == pytest.approx(1.12) and found.simulated
    (verdict,) = judge_all("elephants-batch-pruning", [found], Setting("cpu"))
    assert verdict.verdict == TREND


def test_the_figure_has_every_batch_and_the_papers_line():
    left, right = batch_pruning.plot(made_up()).axes
    assert len(left.get_lines()) == 10 and len(right.get_lines()) == 11


def test_the_gpu_tier_needs_a_gpu():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    context = run.context_for("specter-kernel", tier="gpu", seed=0)
    assert batch_pruning.inputs(context) == {}
    with pytest.raises(UserError, match="there is none"):
        batch_pruning.run(context)
