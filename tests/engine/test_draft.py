"""GPTQ codes draft in the engine: they are those of the quantised transformers model, and they change no text."""

import numpy as np
import pytest
import torch

from specter_lab import paths
from specter_lab.compress.calibration import calibration_ids
from specter_lab.compress.checkpoint import load_quantized
from specter_lab.compress.int4 import dequantize_bank
from specter_lab.compress.quantizers import quantize
from specter_lab.engine import api, bench_draft, draft
from specter_lab.engine.decoder import forward, new_kv_cache
from specter_lab.engine.ops import TorchOps
from specter_lab.engine.random_model import random_weights
from specter_lab.engine.weights import load_weights
from specter_lab.errors import UserError
from specter_lab.models.experts import with_experts
from specter_lab.models.load import load as load_reference

MODELS = ("qwen-nano", "phi-nano", "deepseek-nano")
TEXT = "The old man walked along the river and then he said to his son"
PARTS = ("gate", "up", "down")
SLOTS = {"expert_budget": 4, "in_slots": True}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """Zoo model -> folder of its GPTQ checkpoint, from a little calibration text."""
    cache, made = tmp_path_factory.mktemp("quantised"), {}
    for model in MODELS:
        source = load_reference(model)
        ids = calibration_ids(source.tokenizer, sequences=8, length=128)
        made[model] = quantize(source, "gptq-int4-batched", ids, cache)
    return made


@pytest.fixture(scope="module")
def weights():
    return {model: load_weights(model, device="cpu") for model in MODELS}


def ids_of(weights):
    return torch.tensor(weights.tokenizer(TEXT)["input_ids"])


def same(found, expected):
    return all(
        torch.equal(getattr(a, part).packed, getattr(b, part).packed)
        and torch.equal(getattr(a, part).scales, getattr(b, part).scales)
        for a, b in zip(found, expected, strict=True)
        for part in PARTS
    )


@pytest.mark.parametrize("model", MODELS)
def test_the_draft_is_the_quantised_transformers_model(model, quantised, weights):
    """Effective weights are equal; logits differ by the order of sums alone."""
    source = load_reference(model)
    expected = load_quantized(quantised[model], source).banks
    found = weights[model].draft(str(quantised[model]))
    for bank, original in zip(found.banks, expected, strict=True):
        assert all(torch.equal(getattr(dequantize_bank(bank), part), getattr(original, part)) for part in PARTS)
    ids = torch.randint(3, 2048, (24,), generator=torch.Generator().manual_seed(0))
    kv = new_kv_cache(weights[model].shape, 32, weights[model].decoder.embedding)
    with torch.inference_mode():
        logits = with_experts(source.model, expected)(ids[None]).logits[0]
        plain = source.model(ids[None]).logits[0]
        passed = forward(weights[model].decoder, ids, torch.tensor([0]), kv, found, TorchOps())
    assert (passed.logits - logits).abs().max() < 2e-6 * logits.abs().max() < 1e-2 * (plain - logits).abs().max()


@pytest.mark.parametrize("transport", api.TRANSPORTS)
@pytest.mark.parametrize("mode", ["fast", "paper"])
@pytest.mark.parametrize("model", MODELS)
def test_it_changes_no_text(model, mode, transport, quantised, weights):
    ids = ids_of(weights[model])
    expected = api.engine_for(weights[model], draft="none", **SLOTS).generate(ids, 32, ignore_eos=True)
    engine = api.engine_for(weights[model], draft=str(quantised[model]), mode=mode, transport=transport, **SLOTS)
    assert torch.equal(engine.generate(ids, 32, depth=4, ignore_eos=True), expected)
    assert engine.stats.accepted > 0.4 * engine.stats.drafted and engine.draft.name == str(quantised[model])
    if mode == "fast":
        batch = engine.generate_batch([ids, ids[:5]], 16, depth=2, ignore_eos=True)
        assert torch.equal(batch[0], expected[:, : len(ids) + 16])


@pytest.mark.gpu
@pytest.mark.parametrize("transport", api.TRANSPORTS)
@pytest.mark.parametrize("mode", ["fast", "paper"])
@pytest.mark.parametrize("model", MODELS)
def test_it_changes_no_text_on_a_gpu(model, mode, transport, quantised, weights):
    there, folder = load_weights(model, device="cuda"), str(quantised[model])
    ids = ids_of(there)
    expected = api.engine_for(there, draft="none", **SLOTS).generate(ids, 32, ignore_eos=True)
    engine = api.engine_for(there, draft=folder, mode=mode, transport=transport, **SLOTS)
    assert torch.equal(engine.generate(ids, 32, depth=4, ignore_eos=True), expected)
    assert engine.stats.accepted > 0.4 * engine.stats.drafted
    for bank, expected in zip(engine.draft.banks, weights[model].draft(folder).banks, strict=True):
        assert all(torch.equal(getattr(bank, part).packed.cpu(), getattr(expected, part).packed) for part in PARTS)


@pytest.mark.parametrize("model", MODELS)
def test_experts_come_whole_beside_gptq_codes(model, quantised, weights):
    """Error compensation moves codes away from the weights: more of them are listed as they are, and nothing is lost."""
    engine = api.engine_for(
        weights[model], draft=str(quantised[model]), mode="paper", transport="residual", expert_budget=6, in_slots=True
    )
    engine.memory.device.fill_(float("nan"))
    engine.generate(ids_of(weights[model]), 24)
    memory = engine.memory
    for layer, expert in zip(*np.nonzero(memory.slots.slot_of >= 0)):
        place = memory.device[memory.first_slot[layer] + memory.slots.slot_of[layer, expert]]
        assert torch.equal(place, memory.host[layer, expert])
    gptq, rounded = weights[model].records(str(quantised[model])), weights[model].records()
    assert gptq.exceptions.sum() > rounded.exceptions.sum() and rounded.bits < gptq.bits < 12
    assert memory.transport.bits == gptq.bits


def test_a_quantiser_by_name_runs_once(out, weights, monkeypatch):
    """Rounding to nearest through the cache gives the codes that the engine rounds itself."""
    engine = api.load("qwen-nano", device="cpu", draft="rtn-int4", **SLOTS)
    assert engine.draft.name == "rtn-int4" and same(engine.draft.banks, weights["qwen-nano"].draft().banks)
    (folder,) = (path for path in (paths.CACHE / "quantized").glob("qwen-nano-rtn-int4-*") if path.is_dir())
    made, calls = folder.stat().st_mtime_ns, []
    draft._made.cache_clear()  # as a new process
    monkeypatch.setattr("specter_lab.compress.quantizers.load", lambda *a, **k: calls.append(a))
    again = api.load("qwen-nano", device="cpu", draft="rtn-int4", **SLOTS)
    assert same(again.draft.banks, engine.draft.banks) and folder.stat().st_mtime_ns == made and not calls


def test_a_widened_model_drafts_with_the_small_ones_codes(quantised, weights, tmp_path):
    """At twice the width, so that a CPU holds it; text and acceptance are the small model's."""
    small, gptq = weights["qwen-nano"], str(quantised["qwen-nano"])
    twice = {"hidden_size": 512, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256,
             "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
    type(small.config)(**{**small.config.to_dict(), **twice}).save_pretrained(tmp_path / "twice")
    wide = load_weights("qwen-nano", device="cpu", widen_to=str(tmp_path / "twice"))
    assert wide.shape.hidden == 2 * small.shape.hidden and wide.shape.expert_width == 4 * small.shape.expert_width
    found = [api.engine_for(each, draft=gptq, mode="paper", **SLOTS) for each in (small, wide)]
    texts = [engine.generate(ids_of(small), 24, depth=4) for engine in found]
    assert torch.equal(*texts) and found[0].stats.accepted == found[1].stats.accepted


def test_drafts_that_cannot_be(quantised, weights, tmp_path):
    qwen = weights["qwen-nano"]
    for name, message in (
        ("int5", "no draft 'int5': choose one of int4, none, gptq-int4"),
        ("gptq-int8", "symmetric 4-bit codes in groups of 128, gptq-int8 makes others: choose one of int4, none"),
        ("awq-int4", "awq-int4 makes others"),
        (str(tmp_path), "not a quantised checkpoint"),
        (str(quantised["phi-nano"]), "qwen-nano has 60 experts in every layer"),
    ):
        with pytest.raises(UserError, match=message):
            api.engine_for(qwen, draft=name, **SLOTS)
    with pytest.raises(UserError, match="no model 'random"):
        api.engine_for(random_weights("qwen-nano", device="cpu"), draft="rtn-int4", **SLOTS)


def test_another_models_codes_of_the_same_shapes_are_refused(quantised, weights):
    """What shapes do not tell: the experts of this model in another order."""
    qwen = load_weights("qwen-nano", device="cpu")
    qwen.host.copy_(qwen.host.flip(1).clone())
    with pytest.raises(UserError, match="is not of qwen-nano: its codes are 1[0-9][0-9]% away from the weights"):
        api.engine_for(qwen, draft=str(quantised["qwen-nano"]), **SLOTS)


def test_the_bench_counts_and_compares(quantised, weights):
    prompts = [ids_of(weights["qwen-nano"]), torch.arange(3, 9)]
    drafts = ["int4", str(quantised["qwen-nano"])]
    found = list(bench_draft.rows(weights["qwen-nano"], drafts, prompts, depth=3, new_tokens=12, slots=4))
    assert [row.draft for row in found] == drafts and all(row.same_text and row.prompts == 2 for row in found)
    for row in found:
        assert 0 < row.acceptance_low <= row.acceptance <= row.acceptance_high <= 1 < row.tokens_per_round <= 4
    assert (found[0].gain, found[0].gain_low, found[0].gain_high) == (0, 0, 0)
    assert found[1].gain == pytest.approx(found[1].acceptance - found[0].acceptance)
    assert 9 < found[0].residual_bits < found[1].residual_bits and found[0].exceptions < found[1].exceptions


@pytest.mark.parametrize("transport", api.TRANSPORTS)
def test_it_changes_no_text_where_the_host_shares(transport, quantised, weights):
    """In float32 the host's sums are close enough for the same greedy text."""
    qwen, folder = weights["qwen-nano"], str(quantised["qwen-nano"])
    expected = api.engine_for(qwen, draft="none", **SLOTS).generate(ids_of(qwen), 32, ignore_eos=True)
    engine = api.engine_for(qwen, draft=folder, mode="shared", transport=transport, **SLOTS)
    assert torch.equal(engine.generate(ids_of(qwen), 32, depth=4, ignore_eos=True), expected)
