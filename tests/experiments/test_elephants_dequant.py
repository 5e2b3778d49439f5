"""elephants-dequant: the checks can fail, sizes are the papers', claims are read off the rows."""

import pytest
import torch

from specter_lab.compress import i2f, per_channel
from specter_lab.experiments import run
from specter_lab.experiments.claims import claims_of
from specter_lab.experiments.elephants import dequant
from specter_lab.models.switch import ELEPHANTS


@pytest.fixture(scope="module")
def rows():
    return dequant.run(run.context_for("elephants-dequant", tier="cpu", seed=0))


def test_every_claim_has_a_value(rows):
    found = {measured.id: measured for measured in dequant.claims(rows)}
    assert set(found) == {claim.id for claim in claims_of("elephants-dequant")}
    assert all(measured.value == 1.0 for name, measured in found.items() if "exact" in name or "layout" in name)


def test_a_wrong_offset_would_be_found(monkeypatch):
    monkeypatch.setattr(i2f, "BF16_BASE", 127)
    assert min(row["value"] for row in dequant._exactness() if row["name"] == "int4-bf16") < 0.01


def test_a_wrong_order_would_be_found(monkeypatch):
    monkeypatch.setattr(i2f, "INT4_ORDER", tuple(range(8)))
    assert min(row["value"] for row in dequant._exactness()) < 1


def test_all_codes_are_there():
    assert {tuple(pair) for pair in torch.unique(i2f.unpack_int4(dequant.int4_words()[:, None])[:, :2], dim=0).tolist()} == {
        (a, b) for a in range(-8, 8) for b in range(-8, 8)}  # fmt: skip
    assert all(len(dequant.int8_words()[:, place].unique()) == 256 for place in range(4))


def test_sizes_are_the_papers(rows):
    assert (ELEPHANTS.expert_parameters + ELEPHANTS.other_parameters) / 1e9 == pytest.approx(5.32, abs=0.005)
    sizes = rows[rows["metric"] == dequant.SIZE].set_index("name")["value"]
    assert sizes.round(1).to_dict() == {"fp16": 10.6, "int8": 5.8, "int4": 3.4}


def test_int4_errs_more_and_the_figure_says_so(rows):
    table = dequant.errors(rows)
    assert (table.loc["int4"] > 10 * table.loc["int8"]).all() and list(table.columns) == list(per_channel.DIVISORS)
    assert [axis.get_title(loc="left")[0] for axis in dequant.plot(rows).axes] == ["a", "b"]
