"""Small random models of the architectures beside the zoo's three, saved the way real ones are."""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from specter_lab.models.adapters import adapter_for
from specter_lab.paths import ZOO

COMMON = dict(
    vocab_size=2048, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    num_hidden_layers=3, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
CONFIGS = {
    "mixtral": MixtralConfig(**COMMON, intermediate_size=64, num_local_experts=8),
    "olmoe": OlmoeConfig(**COMMON, intermediate_size=64, num_experts=16),
    "qwen3_moe": Qwen3MoeConfig(  # its second layer is dense
        **COMMON, intermediate_size=192, moe_intermediate_size=64, num_experts=16, head_dim=32, norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
}  # fmt: skip
EXPERTS = {"mixtral": 8, "olmoe": 16, "qwen3_moe": 16}
MOE_LAYERS = {"mixtral": [0, 1, 2], "olmoe": [0, 1, 2], "qwen3_moe": [0, 2]}


def save(kind: str, folder: Path) -> Path:
    """A checkpoint in BF16 with the zoo's tokenizer; routers spread the tokens, experts matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).requires_grad_(False)
    for layer in adapter_for(model.config).moe_layers(model):
        layer.router.weight.normal_(std=1.0)
        layer.experts.gate_up_proj.normal_(std=0.05)
        layer.experts.down_proj.normal_(std=0.05)
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in (ZOO / "tokenizer").glob("tokenizer*.json"):
        shutil.copy(file, folder / file.name)
    return folder
