"""ggml's quantiser against gguf-py's, llama.cpp's fallback rule, and files that gguf-py reads."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType

from specter_lab.compress import ggml
from specter_lab.compress.gguf import FILE_NAME, fallbacks, quantize_bank, write_gguf
from specter_lab.models.experts import read_banks

K_TYPES = (GgmlType.Q2_K, GgmlType.Q3_K, GgmlType.Q4_K, GgmlType.Q5_K, GgmlType.Q6_K)
ROWS = 0.02 * np.random.default_rng(0).standard_normal((8, 256), np.float32)


@pytest.mark.parametrize("kind", [GgmlType.Q4_0, GgmlType.Q5_0, GgmlType.Q5_1, GgmlType.Q8_0, GgmlType.F16])
def test_same_bytes_as_gguf_py_where_it_can_quantise(kind):
    assert np.array_equal(ggml.quantize_rows(ROWS, kind), gguf.quantize(ROWS, kind).view(np.uint8))


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (GgmlType.Q2_K, 0.31), (GgmlType.Q3_K, 0.16), (GgmlType.Q4_K, 0.08), (GgmlType.Q5_K, 0.04),
        (GgmlType.Q6_K, 0.02), (GgmlType.IQ4_NL, 0.08),
    ],
)  # fmt: skip
def test_gguf_py_reads_what_it_cannot_write(kind, error):
    stored = ggml.quantize_rows(ROWS, kind)
    assert stored.shape == (8, ggml.row_bytes(kind, 256))
    off = np.linalg.norm(gguf.dequantize(stored, kind) - ROWS) / np.linalg.norm(ROWS)
    assert error / 3 < off < error


def test_rows_that_do_not_fill_a_block_are_an_error():
    with pytest.raises(ValueError, match="Q4_K holds blocks of 256"):
        ggml.quantize_rows(ROWS[:, :32], GgmlType.Q4_K)


def test_fallback_rule():
    """llama.cpp, src/llama-quant.cpp: what a K type becomes when a row is not a multiple of 256."""
    fallback = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
    for kind in K_TYPES:
        assert ggml.type_for_rows(kind, 512) == kind
        assert ggml.type_for_rows(kind, 1408).name == fallback[kind.name]
        assert ggml.type_for_rows(kind, 40) == GgmlType.F16
    assert ggml.type_for_rows(GgmlType.Q8_0, 32) == GgmlType.Q8_0


@pytest.fixture
def q4_k(source, tmp_path):
    write_gguf(source, GgmlType.Q4_K, tmp_path)
    return {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / FILE_NAME).tensors}


def test_experts_are_named_typed_and_shaped_as_llama_cpp_has_them(source, q4_k):
    for bank in read_banks(source.model):
        for projection, kind in (("gate", "Q4_K"), ("up", "Q4_K"), ("down", "Q5_0")):  # rows of 256; of 32 or 64
            tensor = q4_k[f"blk.{bank.layer}.ffn_{projection}_exps.weight"]
            weights = getattr(bank, projection)
            assert tensor.tensor_type.name == kind
            assert tuple(tensor.shape) == tuple(reversed(weights.shape))  # ggml counts dimensions from the row
            values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
            assert (values - weights).norm() < 0.08 * weights.norm()
    assert fallbacks(source, GgmlType.Q4_K)[0].startswith("down: rows of ")
    assert fallbacks(source, GgmlType.Q4_0) == ()


def test_everything_else_is_stored_as_it_is(source, q4_k):
    """Under llama.cpp's names; routers in F32; nothing lost."""
    config = source.model.config
    experts = [name for name in q4_k if "_exps" in name]
    parameters = dict(source.model.named_parameters())
    assert len(q4_k) - len(experts) == sum(".experts." not in name for name in parameters)
    embedding = gguf.dequantize(q4_k["token_embd.weight"].data, q4_k["token_embd.weight"].tensor_type)
    assert np.array_equal(embedding, parameters["model.embed_tokens.weight"].numpy())
    for layer in source.adapter.moe_layers(source.model):
        router = q4_k[f"blk.{layer.index}.ffn_gate_inp.weight"]
        assert router.tensor_type == GgmlType.F32
        assert np.array_equal(router.data, layer.router.weight.numpy())
    assert q4_k["output_norm.weight"].shape[0] == config.hidden_size


def test_metadata_name_the_architecture(qwen, tmp_path):
    write_gguf(qwen, GgmlType.Q8_0, tmp_path)
    fields = gguf.GGUFReader(tmp_path / FILE_NAME).fields
    assert fields["general.architecture"].contents() == "qwen2moe"
    assert fields["qwen2moe.expert_count"].contents() == 8
    assert fields["qwen2moe.block_count"].contents() == 4


def test_the_same_bytes_twice(qwen):
    bank = read_banks(qwen.model)[0]
    first, second = quantize_bank(bank, GgmlType.Q3_K), quantize_bank(bank, GgmlType.Q3_K)
    assert np.array_equal(first.gate, second.gate) and np.array_equal(first.down, second.down)
