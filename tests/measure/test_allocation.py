import pytest
import torch
from transformers import AutoModelForCausalLM

from specter_lab.measure.allocation import allocated_bytes, storage_bytes
from specter_lab.models.anatomy import anatomy, parameters_by_part
from specter_lab.models.zoo.shapes import SHAPES
from specter_lab.plan.memory import PARTS, footprints

TOKENS = 40


@pytest.mark.parametrize("name", ["qwen-nano", "phi-nano", "deepseek-nano"])
def test_what_is_counted_is_what_is_allocated(name):
    model = AutoModelForCausalLM.from_config(SHAPES[name].config).to(torch.bfloat16).eval()
    parts = anatomy(SHAPES[name].config, name)
    not_bf16 = sum(p.nbytes - 2 * p.numel() for p in parameters_by_part(model)["routers"])
    counted = footprints(
        parts, context_tokens=TOKENS, draft_experts=parts.num_experts, target_experts=parts.num_experts
    )
    for i, level in enumerate(counted):
        copies = 2 if i < 2 else 1  # routers are among the "other parameters", shared from the third level on
        assert allocated_bytes(model, TOKENS, PARTS[:i]) == level.total + copies * not_bf16


def test_storages_count_once():
    tensor = torch.zeros(10, 4)
    assert storage_bytes([tensor, tensor[2:], tensor.T, torch.zeros(3)]) == 160 + 12
