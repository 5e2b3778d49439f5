"""elephants-table2: one setting measured on a tiny model, claims and figure from rows made up."""

import itertools

import pandas as pd
import pytest
import torch
from transformers import SwitchTransformersForConditionalGeneration

from specter_lab.compress import per_channel
from specter_lab.compress.switch import SCOPES
from specter_lab.experiments.claims import REPRODUCED, Setting, claims_of, judge_all
from specter_lab.experiments.elephants import table2
from specter_lab.models.zoo.pairs import read_pairs
from specter_lab.models.zoo.translation import DIRECTIONS, config, pair_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    tiny = config(d_model=32, d_ff=48, heads=2, head_dim=16, encoder_layers=4, decoder_layers=2, dropout=0.0, experts=6)
    path = tmp_path_factory.mktemp("tiny-switch")
    SwitchTransformersForConditionalGeneration(tiny).save_pretrained(path)
    pair_tokenizer(read_pairs("test")[:400]).save_pretrained(path)
    return str(path)


@pytest.fixture
def rows():
    found = []
    for direction, beam, bits in itertools.product(DIRECTIONS, table2.BEAMS, (16, *per_channel.BITS)):
        ways = [("", table2.NONE)] if bits == 16 else [(d, s) for d in per_channel.DIVISORS for s in SCOPES]
        for number, (divisor, scope) in enumerate(ways):
            change = 0.0 if bits == 16 else -0.01 * (9 - bits) - 0.1 * number
            found.append({"model": "m", "direction": direction, "beam": beam, "bits": bits, "divisor": divisor, "scope": scope,
                          "bleu": 30 + change, "bleu_low": 29.0, "bleu_high": 31.0, "change": change, "change_low": change - 0.05,
                          "change_high": change + 0.05, "sentences": 100})  # fmt: skip
    return pd.DataFrame(found)


def test_one_setting_is_measured(folder, monkeypatch):
    monkeypatch.setattr(table2, "MAX_TOKENS", 6)
    found = pd.DataFrame(table2.measure(folder, "", "en-de", 2, sentences_used=6, seed=0))
    assert found["bits"].tolist() == [16] + [4] * 4 + [8] * 4 and (found["domain"] == table2.DOMAIN).all()
    assert (found["change_low"] <= found["change"] + 1e-9).all() and (
        found["change"] <= found["change_high"] + 1e-9
    ).all()
    assert (found["bleu"].iloc[1:] - found["bleu"].iloc[0] - found["change"].iloc[1:]).abs().max() < 1e-9
    shares = found[found["bits"] == 4].set_index(["scope", "divisor"])["quantised_share"]
    assert shares[SCOPES[0], per_channel.CLIPPING] < shares[SCOPES[1], per_channel.CLIPPING]


def test_every_claim_has_a_value_from_the_papers_way(rows):
    found = {measured.id: measured for measured in table2.claims(rows)}
    assert set(found) == {claim.id for claim in claims_of("elephants-table2")}
    assert found["elephants-table2/bleu-change@en-de-beam2-int4"].value == pytest.approx(-0.05)
    assert found["elephants-table2/mean-bleu-change@int8"].value == pytest.approx(-0.01)
    assert all(v.verdict == REPRODUCED for v in judge_all("elephants-table2", found.values(), Setting("cpu")))


def test_the_figure_has_both_widths(rows):
    assert [axis.get_title(loc="left") for axis in table2.plot(rows).axes] == ["int8", "int4"]
    assert table2.changes(rows).shape == (8, 4)
