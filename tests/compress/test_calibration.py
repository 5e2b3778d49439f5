"""Calibration ids are a function of text, tokenizer and seed; coverage counts where they go."""

import json

import pytest
import torch

from specter_lab.compress import coverage
from specter_lab.compress.calibration import calibration_ids, digest_of
from specter_lab.compress.coverage import Coverage
from specter_lab.errors import UserError


def test_ids_are_a_function_of_the_seed(qwen):
    first, again = (calibration_ids(qwen.tokenizer, sequences=4, length=32, seed=3) for _ in range(2))
    other = calibration_ids(qwen.tokenizer, sequences=4, length=32, seed=4)
    assert first.shape == (4, 32) and first.dtype == torch.int64
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert 0 <= first.min() and first.max() < qwen.model.config.vocab_size
    assert digest_of(first) == digest_of(again) != digest_of(other)
    assert digest_of(first) != digest_of(first.view(8, 16))


def test_the_default_set_is_there_and_varied(qwen):
    ids = calibration_ids(qwen.tokenizer)
    assert ids.shape == (128, 256) and len(ids.unique()) > 1000


def test_missing_and_short_text(qwen, tmp_path):
    with pytest.raises(UserError, match="no calibration text"):
        calibration_ids(qwen.tokenizer, path=tmp_path / "none.jsonl")
    short = tmp_path / "short.jsonl"
    short.write_text(json.dumps({"text": "a few words"}) + "\n")
    with pytest.raises(UserError, match="ask for fewer"):
        calibration_ids(qwen.tokenizer, path=short)


def test_coverage_counts_every_token_and_survives_json(source, ids):
    measured = coverage.measure(source, ids, fallback="none")
    assert measured.layers == tuple(layer.index for layer in source.adapter.moe_layers(source.model))
    assert all(sum(row) == ids.numel() * source.top_k for row in measured.tokens_per_expert)
    assert Coverage.from_json(json.loads(json.dumps(measured.to_json()))) == measured


def test_starved_experts_are_listed():
    counts = {3: torch.tensor([5, 0, 1]), 1: torch.tensor([2, 2, 2])}
    found = coverage.of_counts(counts, 3, fallback="rounded to nearest")
    assert found.layers == (1, 3) and found.starved == ((3, 1),)
    assert found.to_json()["starved"] == ((3, 1),)
