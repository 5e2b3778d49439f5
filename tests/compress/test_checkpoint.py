"""One reader for all formats, and what it refuses."""

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from safetensors.torch import load_file, save_file

from specter_lab.compress import awq, gptq_format, grid, rtn
from specter_lab.compress.checkpoint import load_quantized
from specter_lab.compress.gguf import FILE_NAME, write_gguf
from specter_lab.compress.gptq_checkpoint import write_gptq
from specter_lab.errors import UserError
from specter_lab.models.experts import read_banks, with_experts


@pytest.fixture
def packed(qwen, tmp_path):
    """A 4-bit round-to-nearest checkpoint, as a stranger would find it: no manifest, no report."""
    folder = tmp_path / "packed"
    folder.mkdir()
    write_gptq(qwen, [rtn.quantize_bank(bank, 4) for bank in read_banks(qwen.model)], 4, 128, "test", folder)
    return folder


def edit(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("bits", grid.BITS)
def test_packed_experts_come_back_exactly(source, tmp_path, bits):
    coded = [rtn.quantize_bank(bank, bits) for bank in read_banks(source.model)]
    write_gptq(source, iter(coded), bits, 128, "test", tmp_path)
    loaded = load_quantized(tmp_path, source)
    assert loaded.quantizer == f"gptq-int{bits}" and loaded.coverage is None and loaded.notes == ()
    for bank, original in zip(loaded.banks, coded):
        assert bank.layer == original.layer
        for projection in ("gate", "up", "down"):
            assert torch.equal(getattr(bank, projection), grid.dequantize(getattr(original, projection)))
    draft = with_experts(source.model, loaded.banks)
    assert draft(torch.arange(3, 20)[None]).logits.isfinite().all()


def test_bits_per_weight_are_measured(qwen, packed):
    """4 bits, a 16-bit scale and a 4-bit zero point per group: 128 inputs in gate and up, 32 in down."""
    expected = 4 + (2 * (20 / 128) + 20 / 32) / 3
    assert load_quantized(packed, qwen).bits_per_weight == pytest.approx(expected)


def test_gguf_files_and_folders_load(qwen, tmp_path):
    write_gguf(qwen, GgmlType.Q6_K, tmp_path)
    loaded = load_quantized(tmp_path / FILE_NAME, qwen)
    assert loaded.quantizer == "gguf-q6_k" and loaded.bits_per_weight == pytest.approx((2 * 6.5625 + 8.5) / 3)
    for bank, original in zip(loaded.banks, read_banks(qwen.model)):
        assert (bank.gate - original.gate).norm() < 0.02 * original.gate.norm()
    assert torch.equal(load_quantized(tmp_path, qwen).banks[0].up, loaded.banks[0].up)
    shutil.copy(tmp_path / FILE_NAME, tmp_path / "other.gguf")
    with pytest.raises(UserError, match="2 GGUF files"):
        load_quantized(tmp_path, qwen)


def awq_words(values):
    """[R, C] nibbles -> [R, C / 8] int32 in AWQ's order."""
    shifts = torch.empty(8, dtype=torch.int64)
    shifts[list(awq.NIBBLE_ORDER)] = 4 * torch.arange(8)
    words = (values.unflatten(1, (-1, 8)) << shifts).sum(dim=-1)
    return words.to(torch.uint32).view(torch.int32)


def test_awq_experts_work_behind_the_original_norm(qwen, tmp_path):
    """AWQ divides the norm by scales and multiplies gate and up; what is read has the scales taken out again."""
    generator = torch.Generator().manual_seed(0)
    tensors, expected, folded = {}, {}, 2.0 ** torch.randint(-2, 3, (256,), generator=generator)
    for bank in read_banks(qwen.model):
        norm = qwen.model.model.layers[bank.layer].post_attention_layernorm.weight
        tensors[f"model.layers.{bank.layer}.post_attention_layernorm.weight"] = norm / folded
        for expert in range(8):
            for projection in ("gate", "up", "down"):
                out, features = getattr(bank, projection).shape[1:]
                codes = torch.randint(0, 16, (features, out), generator=generator)
                zeros = torch.randint(0, 16, (features // 32, out), generator=generator)
                scales = torch.rand(features // 32, out, generator=generator).half()
                prefix = f"model.layers.{bank.layer}.mlp.experts.{expert}.{projection}_proj"
                tensors |= {f"{prefix}.qweight": awq_words(codes), f"{prefix}.qzeros": awq_words(zeros)}
                tensors[f"{prefix}.scales"] = scales
                weights = (codes - zeros.repeat_interleave(32, 0)) * scales.float().repeat_interleave(32, 0)
                expected[bank.layer, expert, projection] = weights.t() / (1 if projection == "down" else folded)
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    loaded = load_quantized(tmp_path, qwen)
    assert loaded.quantizer == "awq-int4" and loaded.bits_per_weight == pytest.approx(4 + 20 / 32)
    for bank in loaded.banks:
        for expert in range(8):
            for projection in ("gate", "up", "down"):
                assert torch.allclose(getattr(bank, projection)[expert], expected[bank.layer, expert, projection])


def test_quantised_attention_is_reported_and_left_alone(qwen, packed):
    shared = packed / "model-shared.safetensors"
    edit(shared, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.qweight": torch.zeros(32, 256)}))
    loaded = load_quantized(packed, qwen)
    assert len(loaded.notes) == 1 and "model.layers.0.self_attn.q_proj" in loaded.notes[0]


@pytest.mark.parametrize("router", ["mlp.gate", "mlp.router", "block_sparse_moe.gate"])
def test_a_quantised_router_is_refused(qwen, packed, router):
    words = torch.zeros(32, 8, dtype=torch.int32)
    shared = packed / "model-shared.safetensors"
    edit(shared, lambda tensors: tensors.update({f"model.layers.1.{router}.qweight": words}))
    with pytest.raises(UserError, match=f"router 'model.layers.1.{router}' is quantised"):
        load_quantized(packed, qwen)


def test_a_quantised_router_in_a_gguf_file_is_refused(qwen, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "r.gguf", "qwen2moe")
    rows = gguf.quantize(np.ones((8, 256), np.float32), GgmlType.Q8_0)
    writer.add_tensor("blk.2.ffn_gate_inp.weight", rows, raw_dtype=GgmlType.Q8_0)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(UserError, match="router 'blk.2.ffn_gate_inp.weight' is quantised"):
        load_quantized(tmp_path / "r.gguf", qwen)


def drop(prefix):
    def change(tensors):
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


def poison(tensors):
    tensors["model.layers.1.mlp.experts.3.up_proj.scales"][0, 0] = torch.inf


def widen(tensors):
    name = "model.layers.1.mlp.experts.3.up_proj"
    wide = gptq_format.to_tensors(grid.round_to_nearest(torch.zeros(1, 64, 256), 4), 0)
    tensors.update({f"{name}.{key}": value for key, value in wide.items()})


def a_ninth_expert(tensors):
    for name in [name for name in tensors if ".experts.7." in name]:
        tensors[name.replace(".experts.7.", ".experts.8.")] = tensors[name].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("model.layers.1.mlp.experts.3."), "of expert 3 in layer 1 is missing"),
        (drop("model.layers.1.mlp.experts.3.up_proj.qzeros"), "experts.3.up_proj' cannot be read"),
        (drop("model.layers.1"), "expert tensors are missing, first down of layer 1"),
        (poison, "up of layer 1 holds values that are not finite"),
        (widen, "up in layer 1 has experts of several shapes"),
        (a_ninth_expert, "down of layer 1 has shape"),
    ],
)
def test_incomplete_and_foreign_experts_are_refused(qwen, packed, change, message):
    edit(packed / "model-experts-001.safetensors", change)
    with pytest.raises(UserError, match=message):
        load_quantized(packed, qwen)


def test_another_models_checkpoint_is_refused(sources, packed):
    with pytest.raises(UserError, match="phi-nano"):
        load_quantized(packed, sources["phi-nano"])


@pytest.mark.parametrize("keep", [100, 5000, 60_000])
def test_a_truncated_file_is_refused(qwen, packed, keep):
    file = packed / "model-experts-001.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match="damaged file|cannot be read"):
        load_quantized(packed, qwen)


@pytest.mark.parametrize("keep", [3, 100, 4000, 1_000_000])
def test_a_truncated_gguf_file_is_refused(qwen, tmp_path, keep):
    write_gguf(qwen, GgmlType.Q4_0, tmp_path)
    file = tmp_path / FILE_NAME
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match="not a whole GGUF file"):
        load_quantized(file, qwen)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "no readable quantization_config"),
        ({}, "no readable quantization_config"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised by 'bitsandbytes'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}, "as 'gemv'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}}, "as 'marlin'"),
    ],
)
def test_unreadable_methods_are_named(qwen, packed, config, message):
    (packed / "config.json").unlink()
    if config is not None:
        (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        load_quantized(packed, qwen)


def test_what_is_not_there(qwen, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # do not wait for a network
    with pytest.raises(UserError, match="not a quantised checkpoint"):
        load_quantized(tmp_path, qwen)
    with pytest.raises(UserError, match="no GGUF file"):
        load_quantized(tmp_path / "missing.gguf", qwen)
    with pytest.raises(UserError, match="cannot fetch 'org/name/file.gguf'"):
        load_quantized("org/name/file.gguf", qwen)
