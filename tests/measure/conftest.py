from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from specter_lab.measure.prompts import Request, TokenizedRequests
from specter_lab.measure.trace import Origin
from specter_lab.models.adapters import adapter_for
from specter_lab.models.experts import read_banks, with_experts
from specter_lab.models.zoo.shapes import SHAPES, VOCAB_SIZE


def build_model(name: str):
    """A zoo shape with random weights; routers widened so that routing is spread, experts so that they matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[name].config).eval().requires_grad_(False)
    for layer in adapter_for(model.config).moe_layers(model):
        torch.nn.init.normal_(layer.router.weight, std=0.2)
        layer.experts.gate_up_proj.mul_(4)
        layer.experts.down_proj.mul_(4)
    return model


@pytest.fixture(scope="session", params=("qwen-nano", "phi-nano", "deepseek-nano"))
def model(request):
    return build_model(request.param)


@pytest.fixture(scope="session")
def qwen():
    return build_model("qwen-nano")


@pytest.fixture
def draft(model):
    """The target with noise on its routed experts: it drafts and routes a little differently."""
    generator = torch.Generator().manual_seed(1)

    def noisy(weight):
        return weight + 0.02 * weight.std() * torch.randn(weight.shape, generator=generator)

    banks = read_banks(model)
    return with_experts(model, [replace(b, gate=noisy(b.gate), up=noisy(b.up), down=noisy(b.down)) for b in banks])


@pytest.fixture
def origin():
    return Origin("random", "0123456789abcdef")


@pytest.fixture
def make_tokens():
    def make(lengths, seed=0) -> TokenizedRequests:
        generator = torch.Generator().manual_seed(seed)
        requests = tuple(Request(f"r{i}", "random", "generated", "none", "-") for i in range(len(lengths)))
        ids = tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=generator) for n in lengths)
        return TokenizedRequests(requests, ids)

    return make
