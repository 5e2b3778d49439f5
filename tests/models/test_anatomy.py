"""Parameters by part and KV bytes, against the published totals and against live models."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from specter_lab.errors import UserError
from specter_lab.models.adapters import adapter_for
from specter_lab.models.anatomy import anatomy, anatomy_of, kv_bytes_per_token, parameters_by_part
from specter_lab.models.geometry import GEOMETRY
from specter_lab.models.originals import ORIGINALS, config_for
from specter_lab.models.zoo.shapes import SHAPES
from tests.models.foreign import CONFIGS, MOE_LAYERS

NANOS = {name: SHAPES[name].config for name in ("qwen-nano", "phi-nano", "deepseek-nano", "dense-nano")}


@pytest.mark.parametrize("name", GEOMETRY)
def test_parts_add_up_to_the_published_model(name):
    found, row = anatomy_of(name), GEOMETRY[name]
    assert found.parameters == row.parameters
    assert found.expert_bytes == row.expert_bytes
    assert found.routed_experts * 2 == row.all_experts_bytes
    assert (found.moe_layers, found.layers - found.moe_layers) == (row.moe_layers, row.dense_layers)
    assert (found.num_experts, found.top_k, found.expert_width) == (row.num_experts, row.top_k, row.expert_width)
    assert (found.shared_experts > 0) == (row.shared_experts > 0)
    assert (found.dense_mlp > 0) == (row.dense_layers > 0)


@pytest.mark.parametrize("name, billions", [("Qwen1.5-MoE-A2.7B", 2.7), ("Phi-3.5-MoE", 6.6), ("DeepSeek-V2-Lite", 2.7),
                                            ("Mixtral-8x7B", 12.9)])  # fmt: skip
def test_active_parameters_are_the_published_ones(name, billions):
    found = anatomy_of(name)
    assert (found.active_parameters + found.embedding) / 1e9 == pytest.approx(billions, abs=0.1)


def test_qwen_parts_by_hand():
    found = anatomy_of("Qwen1.5-MoE-A2.7B")
    assert found.embedding == found.head == 151936 * 2048
    assert found.attention == 24 * (4 * 2048 * 2048 + 3 * 2048)  # biases on q, k, v
    assert found.routers == 24 * 60 * 2048
    assert found.shared_experts == 24 * (3 * 2048 * 5632 + 2048)  # with the gate
    assert found.norms == (2 * 24 + 1) * 2048
    assert found.every_token_parameters == found.parameters - found.routed_experts - found.embedding


def test_a_tied_embedding_is_multiplied_with():
    found = anatomy_of("qwen-nano")
    assert found.head == 0
    assert found.every_token_parameters == found.parameters - found.routed_experts


@pytest.mark.parametrize("config", [*NANOS.values(), *CONFIGS.values()], ids=[*NANOS, *CONFIGS])
def test_kv_bytes_are_those_of_a_real_cache(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        model.model(input_ids=torch.ones(1, 7, dtype=torch.long), cache=cache, use_cache=True)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 7 * kv_bytes_per_token(config)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_parameter_has_one_part(kind):
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    parts = parameters_by_part(model)
    named = [id(p) for of_part in parts.values() for p in of_part]
    assert sorted(named) == sorted(id(p) for p in model.parameters())
    found = anatomy(CONFIGS[kind], kind)
    assert found.parameters == len(torch.cat([p.flatten() for p in model.parameters()]))
    assert found.moe_layers == len(MOE_LAYERS[kind])
    layers = adapter_for(model.config).moe_layers(model)
    assert found.routed_experts == sum(p.numel() for layer in layers for p in layer.experts.parameters())


def test_configs_by_name(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ORIGINALS:
        assert config_for(name) is config_for(GEOMETRY[name].hub_id)  # no network needed
    assert config_for("phi-nano").num_local_experts == 16
    with pytest.raises(UserError, match="cannot fetch the config.json of 'nobody/no-such-model-here'"):
        config_for("nobody/no-such-model-here")
    with pytest.raises(UserError, match="no model 'mixtrall'"):
        config_for("mixtrall")


def test_a_folder_needs_only_a_config(tmp_path):
    CONFIGS["olmoe"].save_pretrained(tmp_path)
    assert anatomy_of(str(tmp_path)).num_experts == 16
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no config.json"):
        config_for(str(tmp_path / "empty"))
