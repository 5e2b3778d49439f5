"""Quantised Switch models: the experts really are, routers never, and everything else is shared."""

import pytest
import torch
from transformers import SwitchTransformersForConditionalGeneration

from specter_lab.compress.per_channel import DIVISORS
from specter_lab.compress.switch import ALL, EXPERTS, quantize_bank, quantized_share, quantized_switch
from specter_lab.models.switch import read_switch_banks
from specter_lab.models.zoo.translation import config


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    tiny = config(d_model=32, d_ff=48, heads=2, head_dim=16, encoder_layers=4, decoder_layers=2, dropout=0.0, experts=6)
    return SwitchTransformersForConditionalGeneration(tiny).eval()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("divisor", DIVISORS)
def test_every_expert_is_on_its_grid(model, bits, divisor):
    for before, after in zip(read_switch_banks(model), read_switch_banks(quantized_switch(model, bits, divisor))):
        for name in ("wi", "wo"):
            old, new = getattr(before, name), getattr(after, name)
            assert not torch.equal(old, new)
            levels = max(len(new[e, :, n].unique()) for e in range(6) for n in range(3))
            assert levels <= 2**bits
            assert (new - old).norm() / old.norm() < (0.2 if bits == 4 else 0.01)


def test_only_experts_differ(model):
    other = quantized_switch(model, 8)
    mine = dict(model.named_parameters())
    different = {name for name, weight in other.named_parameters() if weight is not mine[name]}
    assert different and all(".experts." in name for name in different)


def test_all_layers_but_routers_norms_and_embedding(model):
    other = quantized_switch(model, 8, scope=ALL)
    mine = dict(model.named_parameters())
    same = {name for name, weight in other.named_parameters() if weight is mine[name]}
    assert all(any(part in name for part in ("router", "norm", "bias", "shared", "embed")) for name in same)
    assert not any("router" in name for name in set(mine) - same)
    assert 0 < quantized_share(model, quantized_switch(model, 8)) < quantized_share(model, other) < 1
    ids = torch.randint(3, 100, (2, 5))
    found, expected = (m(input_ids=ids, decoder_input_ids=ids).logits for m in (other, model))
    assert 0 < (found - expected).norm() / expected.norm() < 0.1


def test_a_router_is_a_type_error(model):
    with pytest.raises(TypeError, match="routers and norms"):
        quantize_bank(model.encoder.block[1].layer[-1].mlp.router, 8)
    with pytest.raises(ValueError, match="scope"):
        quantized_switch(model, 8, scope="half")
    assert read_switch_banks(model)[0].wi.shape == (6, 32, 48) and EXPERTS != ALL
