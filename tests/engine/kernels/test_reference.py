"""The oracles themselves: against transformers' own modules, the INT4 layout's own code, and torch's attention."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from specter_lab.compress import int4
from specter_lab.engine.kernels import reference
from specter_lab.models.adapters import adapter_for
from specter_lab.models.experts import ExpertBank, read_bank
from specter_lab.models.zoo.shapes import SHAPES


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def routing(tokens, experts, top_k, seed=3):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    return indices, torch.rand(tokens, top_k, generator=generator)


@pytest.mark.parametrize("name", ["qwen-nano", "phi-nano", "deepseek-nano"])
def test_experts_are_those_of_transformers(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[name].config).eval().requires_grad_(False)
    layer = adapter_for(model.config).moe_layers(model)[0]
    bank, x = read_bank(layer), normal(9, model.config.hidden_size)
    indices, weights = routing(9, bank.num_experts, 4)
    blocks = list(zip(torch.cat((bank.gate, bank.up), dim=1), bank.down))
    expected = layer.experts(x, indices, weights)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(reference.expert_ffn(x, indices, weights, blocks), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("hidden", "width"), [(256, 32), (128, 96), (384, 256)])
def test_int4_weights_are_those_of_the_layout(hidden, width):
    shape = (5, width, hidden)
    source = ExpertBank(0, normal(*shape), normal(*shape, seed=1), normal(5, hidden, width, seed=2))
    bank = int4.quantize_bank(source)
    whole = int4.dequantize_bank(bank)
    for name in ("gate", "up", "down"):
        for expert in range(5):
            assert torch.equal(reference.int4_rows(getattr(bank, name), expert), getattr(whole, name)[expert])
    x, (indices, weights) = normal(3, hidden, seed=4), routing(3, 5, 2)
    blocks = list(zip(torch.cat((whole.gate, whole.up), dim=1), whole.down))
    expected = reference.expert_ffn(x, indices, weights, blocks)
    assert torch.equal(reference.int4_expert_ffn(x, indices, weights, bank), expected)


def test_choices_outside_the_experts_add_nothing():
    blocks = [(normal(64, 16, seed=e), normal(16, 32, seed=9 + e)) for e in range(4)]
    x, weights = normal(2, 16), torch.ones(2, 2)
    found = reference.expert_ffn(x, torch.tensor([[1, 4], [-1, 7]]), weights, blocks)
    assert torch.equal(found[:1], reference.expert_ffn(x[:1], torch.tensor([[1]]), weights[:1, :1], blocks))
    assert not found[1].any()


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_attention_is_torchs(kv_heads):
    tokens, position, size = 5, 11, 32
    q, k, v = normal(tokens, 8, 24), normal(size, kv_heads, 24, seed=1), normal(size, kv_heads, 16, seed=2)
    seen = position + tokens
    mask = torch.ones(tokens, seen, dtype=torch.bool).tril(position)
    expected = scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (q, k[:seen], v[:seen])), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    found = reference.attend(q, k, v, position, 0.3)
    torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_every_row_is_computed_alone():
    x, weight, bias = normal(33, 128).bfloat16(), normal(64, 128, seed=1).bfloat16(), normal(64, seed=2)
    together = reference.linear(x, weight, bias)
    torch.testing.assert_close(together.float(), x.float() @ weight.float().t() + bias, rtol=1e-2, atol=1e-1)
    for row in range(33):
        assert torch.equal(reference.linear(x[row : row + 1].clone(), weight, bias)[0], together[row])
