"""A draft shares everything with its target except the routed experts."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from specter_lab.models.adapters import adapter_for
from specter_lab.models.experts import read_banks, with_experts
from specter_lab.models.routing import observe_routing
from specter_lab.models.zoo.shapes import SHAPES

NANO = ("qwen-nano", "phi-nano", "deepseek-nano")


@pytest.fixture(scope="module", params=NANO)
def model(request):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[request.param].config).eval().requires_grad_(False)
    for layer in adapter_for(model.config).moe_layers(model):
        layer.router.weight.normal_(std=1.0)
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 2048, (2, 17), generator=torch.Generator().manual_seed(1))


def test_banks_are_views_with_the_expected_shapes(model):
    config, adapter = model.config, adapter_for(model.config)
    experts, width = adapter.num_experts(config), adapter.expert_width(config)
    banks = read_banks(model)
    assert len(banks) == len(adapter.moe_layers(model))
    for bank, layer in zip(banks, adapter.moe_layers(model)):
        assert bank.gate.shape == bank.up.shape == (experts, width, config.hidden_size)
        assert bank.down.shape == (experts, config.hidden_size, width)
        assert bank.gate.data_ptr() == layer.experts.gate_up_proj.data_ptr()
        assert bank.num_weights == layer.experts.gate_up_proj.numel() + layer.experts.down_proj.numel()


def test_draft_with_equal_experts_computes_the_same(model, ids):
    draft = with_experts(model, read_banks(model))
    assert torch.equal(draft(ids).logits, model(ids).logits)


def test_draft_aliases_everything_but_the_experts(model):
    draft = with_experts(model, [dataclasses.replace(b, down=b.down * 2) for b in read_banks(model)])
    target = dict(model.named_parameters())
    for name, parameter in draft.named_parameters():
        shared = parameter.data_ptr() == target[name].data_ptr()
        assert shared == (".experts." not in name), name
    for (name, a), (_, b) in zip(model.named_buffers(), draft.named_buffers()):
        assert a.data_ptr() == b.data_ptr(), name


def test_changing_one_expert_changes_the_output_and_leaves_the_target_alone(model, ids):
    before = model(ids).logits
    banks = read_banks(model)
    banks[0] = dataclasses.replace(banks[0], down=banks[0].down * 1.5)
    assert not torch.equal(with_experts(model, banks)(ids).logits, before)
    assert torch.equal(model(ids).logits, before)


def test_wrong_banks_are_refused(model):
    banks = read_banks(model)
    with pytest.raises(ValueError, match="do not fit"):
        with_experts(model, banks[1:])
    with pytest.raises(ValueError, match="needed"):
        with_experts(model, [dataclasses.replace(banks[0], down=banks[0].down[:, :, :-1]), *banks[1:]])


def test_observed_routing_is_what_the_experts_received(model, ids):
    seen = []
    with observe_routing(model, seen.append):
        model(ids)
    layers = adapter_for(model.config).moe_layers(model)
    assert [r.layer for r in seen] == [layer.index for layer in layers]
    k = model.config.num_experts_per_tok
    for routing, layer in zip(seen, layers):
        logits, weights, indices = layer.router(routing.hidden)
        assert torch.equal(logits, routing.logits)
        assert torch.equal(indices, routing.indices) and indices.shape == (ids.numel(), k)
        assert torch.equal(weights, routing.weights)
    model(ids)
    assert len(seen) == len(layers), "the hooks must be gone after the block"
