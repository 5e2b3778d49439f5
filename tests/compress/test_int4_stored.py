"""Codes of a checkpoint in the INT4 layout: the same codes, none unpacked, and a sentence for what the layout cannot hold."""

import json

import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from safetensors.torch import load_file, save_file

from specter_lab.compress import gptq_format, grid, int4
from specter_lab.compress.checkpoint import load_quantized
from specter_lab.compress.gguf import write_gguf
from specter_lab.compress.gptq_checkpoint import write_gptq
from specter_lab.compress.grid import CodedBank, Codes
from specter_lab.compress.int4_stored import RoutedExperts, fits_int4, open_int4, read_int4
from specter_lab.compress.quantizers import QUANTIZERS, quantize
from specter_lab.errors import UserError
from specter_lab.models.experts import read_banks

LAYER = "model-experts-001.safetensors"
EXPERT = "model.layers.1.mlp.experts.3.up_proj"  # of the small Qwen: [32, 256], two groups


def wanted(source):
    banks = read_banks(source.model)
    experts, width, hidden = banks[0].gate.shape
    return RoutedExperts(source.name, tuple(bank.layer for bank in banks), experts, hidden, width)


def random_codes(source, bits=4):
    """Banks in which every code stands at every place of a word."""
    generator = torch.Generator().manual_seed(bits)

    def coded(weights):
        scales = torch.rand(
            *weights.shape[:2], weights.shape[2] // grid.group_of(weights.shape[2]), generator=generator
        )
        codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), weights.shape, generator=generator)
        return Codes(codes.to(torch.int8), (scales + 0.5).half(), bits)

    return [CodedBank(bank.layer, *map(coded, (bank.gate, bank.up, bank.down))) for bank in read_banks(source.model)]


def same(found, expected):
    return all(
        torch.equal(getattr(found, part).packed, getattr(expected, part).packed)
        and torch.equal(getattr(found, part).scales, getattr(expected, part).scales)
        for part in ("gate", "up", "down")
    )


@pytest.fixture
def packed(qwen, tmp_path):
    folder = tmp_path / "packed"
    folder.mkdir()
    write_gptq(qwen, random_codes(qwen), 4, 128, "test", folder)
    return folder


def edit(folder, change, file=LAYER):
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


def set_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def test_codes_come_as_they_are(source, tmp_path):
    coded = random_codes(source)
    write_gptq(source, iter(coded), 4, 128, "test", tmp_path)
    found = list(read_int4(tmp_path, wanted(source)))
    assert [bank.layer for bank in found] == [bank.layer for bank in coded]
    assert all(same(bank, int4.pack_bank(original)) for bank, original in zip(found, coded))


@pytest.mark.parametrize("quantizer", ["gptq-int4-batched", "rtn-int4"])
def test_what_the_cache_holds_has_the_same_effective_weights(source, ids, tmp_path, quantizer):
    folder = quantize(source, quantizer, ids, tmp_path)
    for bank, expected in zip(read_int4(folder, wanted(source)), load_quantized(folder, source).banks, strict=True):
        found = int4.dequantize_bank(bank)
        assert all(torch.equal(getattr(found, part), getattr(expected, part)) for part in ("gate", "up", "down"))


def test_version_2_zero_points(qwen, packed):
    expected = list(read_int4(packed, wanted(qwen)))

    def add_one(tensors):
        for name in tensors:
            if name.endswith("qzeros"):
                tensors[name] = torch.full_like(tensors[name], 0x88888888 - 2**32)

    for file in sorted(packed.glob("model-experts-*")):
        edit(packed, add_one, file.name)
    with pytest.raises(UserError, match="zero points of its own"):
        list(read_int4(packed, wanted(qwen)))
    set_config(packed, checkpoint_format="gptq_v2")
    assert all(map(same, read_int4(packed, wanted(qwen)), expected))


def test_which_quantisers_fit():
    fitting = [name for name, row in QUANTIZERS.items() if fits_int4(row)]
    assert fitting == ["gptq-int4", "gptq-int4-batched", "rtn-int4"]


def other_group(tensors):
    wide = gptq_format.to_tensors(grid.round_to_nearest(torch.randn(1, 32, 256), 4, 64), 0)
    tensors.update({f"{EXPERT}.{name}": value for name, value in wide.items()})


def three_bits(tensors):
    narrow = gptq_format.to_tensors(grid.round_to_nearest(torch.randn(1, 32, 256), 3), 0)
    tensors.update({f"{EXPERT}.{name}": value for name, value in narrow.items()})


def wider(tensors):
    wide = gptq_format.to_tensors(grid.round_to_nearest(torch.randn(1, 64, 256), 4), 0)
    tensors.update({f"{EXPERT}.{name}": value for name, value in wide.items()})


def act_order(tensors):
    tensors[f"{EXPERT}.g_idx"] = tensors[f"{EXPERT}.g_idx"].flip(0).contiguous()


def a_zero_point(tensors):
    tensors[f"{EXPERT}.qzeros"][1, 2] += 16


def infinite(tensors):
    tensors[f"{EXPERT}.scales"][1, 2] = torch.inf


def finer_scales(tensors):
    tensors[f"{EXPERT}.scales"] = tensors[f"{EXPERT}.scales"].float() + 1e-6


def without(prefix):
    def change(tensors):
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


def a_ninth_expert(tensors):
    for name in [name for name in tensors if ".experts.7." in name]:
        tensors[name.replace(".experts.7.", ".experts.8.")] = tensors[name].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_group, f"'{EXPERT}' has 4 groups a row, the engine's draft 2: quantise with 4 bits"),
        (three_bits, f"'{EXPERT}' has 3 bits, the engine's draft 4"),
        (wider, f"'{EXPERT}' has 256 inputs and 64 outputs, the model 256 and 32: use a checkpoint of this very model"),
        (act_order, r"inputs in another order than their groups \(act-order\): quantise with"),
        (a_zero_point, "zero points of its own, it is not symmetric: quantise with"),
        (infinite, "scales that are not finite"),
        (finer_scales, "scales of type torch.float32 that float16 cannot hold"),
        (without(f"{EXPERT}.qzeros"), f"'{EXPERT}' cannot be read"),
        (without("model.layers.1.mlp.experts.3."), "of expert 3 in layer 1 is missing"),
        (without("model.layers.1"), r"has routed experts in layer 1 \(down\), .*packed has none there"),
        (a_ninth_expert, "has 9 experts in a layer, .* 8"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(qwen, packed, change, message):
    edit(packed, change)
    with pytest.raises(UserError, match=message):
        list(read_int4(packed, wanted(qwen)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 8}, "has 8 bits, the engine's draft 4: quantise with 4 bits, symmetric, in groups of 128"),
        ({"quant_method": "awq", "version": "gemm"}, "quantised by awq, whose zero points and input scales"),
        ({"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes'"),
    ],
)
def test_other_methods_are_refused_before_anything_is_read(packed, config, message):
    set_config(packed, **config)
    with pytest.raises(UserError, match=message):
        open_int4(packed)


def test_gguf_is_refused(qwen, tmp_path):
    write_gguf(qwen, GgmlType.Q4_0, tmp_path)
    for path in (tmp_path, *tmp_path.glob("*.gguf")):
        with pytest.raises(UserError, match="is in GGUF format, and the engine's draft has scales for groups of 128"):
            open_int4(path)


def test_another_models_and_altered_checkpoints(sources, packed, ids, tmp_path):
    with pytest.raises(UserError, match="is missing|routed experts in layer|inputs and"):
        list(read_int4(packed, wanted(sources["phi-nano"])))
    folder = quantize(sources["qwen-nano"], "rtn-int4", ids, tmp_path / "cache")
    edit(folder, infinite)
    with pytest.raises(UserError, match="was altered"):
        list(read_int4(folder, wanted(sources["qwen-nano"])))
