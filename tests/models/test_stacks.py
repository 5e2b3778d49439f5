"""Where experts lie, told from the config, is where the model and its checkpoint have them; routing is what a layer uses."""

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

from specter_lab.errors import UserError
from specter_lab.models.load import load, load_translator, resolve
from specter_lab.models.stacks import DROPPED, stacks_of

SPARSE = {"qwen-nano": (0, 1, 2, 3), "phi-nano": (0, 1, 2, 3, 4), "deepseek-nano": (1, 2, 3), "switch-nano": (1, 3, 5)}


@pytest.fixture(params=SPARSE)
def loaded(request):
    return (load_translator if request.param == "switch-nano" else load)(request.param)


def test_every_expert_of_the_checkpoint_is_found(loaded):
    stacks = stacks_of(loaded.model.config)
    sparse = stacks.sparse(loaded.model)
    assert tuple(block.number for block in sparse) == SPARSE[loaded.name]
    named = [key for block in sparse for expert in range(stacks.num_experts) for key in stacks.keys(block, expert)]
    with safe_open(resolve(loaded.name) / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert set(named) == {name for name in names if ".experts." in name} and len(named) == len(set(named))
    in_memory = loaded.model.state_dict().keys()
    assert {stacks.name_in_memory(name) for name in names - set(named)} <= in_memory


def test_routing_is_what_the_layer_hands_to_its_experts(loaded):
    stacks, seen = stacks_of(loaded.model.config), []
    ids = torch.randint(3, 2048, (2, 7))
    for module in stacks.sparse(loaded.model).values():
        module.experts.register_forward_hook(lambda _, arguments, __: seen.append(arguments[:2]))
    loaded.model(input_ids=ids, **({"decoder_input_ids": ids} if loaded.name == "switch-nano" else {}))
    assert len(seen) == len(SPARSE[loaded.name])
    for module, (hidden, chosen) in zip(stacks.sparse(loaded.model).values(), seen):
        indices = stacks.route(module, hidden)
        assert indices.shape == (14, stacks.top_k) and indices.min() >= 0 and indices.max() < stacks.num_experts
        assert torch.equal(indices, stacks.indices(chosen))


def test_a_token_without_expert_is_marked():
    stacks = stacks_of(AutoConfig.for_model("switch_transformers"))
    assert stacks.indices(torch.tensor([[[0, 1, 0]], [[0, 0, 0]]])).tolist() == [[1], [DROPPED]]


def test_other_encoder_decoders_are_refused():
    with pytest.raises(UserError, match="nllb-moe model are not served"):
        stacks_of(AutoConfig.for_model("nllb-moe"))
