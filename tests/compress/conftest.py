"""One small random model per architecture on disk, loaded the way real ones are, shared by all compress tests."""

import copy
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from specter_lab.models.adapters import adapter_for
from specter_lab.models.load import load
from specter_lab.models.zoo.shapes import SHAPES
from specter_lab.paths import ZOO

EXPERTS = {"qwen2_moe": "num_experts", "phimoe": "num_local_experts", "deepseek_v2": "n_routed_experts"}


def save_small_model(name, folder):
    """A zoo shape with eight experts a layer, in BF16, with routers that spread the tokens."""
    config = copy.deepcopy(SHAPES[name].config)
    setattr(config, EXPERTS[config.model_type], 8)
    config.num_experts_per_tok = 2
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    for layer in adapter_for(config).moe_layers(model):
        layer.router.weight.normal_()
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in (ZOO / "tokenizer").glob("tokenizer*.json"):
        shutil.copy(file, folder / file.name)


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """Name -> LoadedModel of a small model of each architecture."""
    folder = tmp_path_factory.mktemp("small-models")
    loaded = {}
    for name in ("qwen-nano", "phi-nano", "deepseek-nano"):
        save_small_model(name, folder / name)
        loaded[name] = load(str(folder / name))
    return loaded


@pytest.fixture(params=["qwen-nano", "phi-nano", "deepseek-nano"])
def source(request, sources):
    return sources[request.param]


@pytest.fixture
def qwen(sources):
    return sources["qwen-nano"]


@pytest.fixture(scope="session")
def ids():
    """Calibration tokens [8, 64]."""
    return torch.randint(3, 2048, (8, 64), generator=torch.Generator().manual_seed(1))
