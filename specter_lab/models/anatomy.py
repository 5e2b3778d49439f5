"""How many parameters every part of a model has, exactly: its tensors are built on the meta device, without memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specter_lab.models.adapters import adapter_for
from specter_lab.models.geometry import BF16_BYTES
from specter_lab.models.originals import config_for


@dataclass(frozen=True)
class Anatomy:
    """Parameters of a decoder MoE by part (all layers together), and the sizes that bytes and FLOPs follow from."""

    name: str
    layers: int  # decoder layers, dense ones included
    moe_layers: int
    num_experts: int  # routed, per MoE layer
    top_k: int
    hidden_size: int
    expert_width: int
    embedding: int
    head: int  # 0: tied to the embedding
    attention: int
    norms: int
    routers: int
    shared_experts: int  # with their gates
    dense_mlp: int
    routed_experts: int
    kv_bytes_per_token: int  # BF16, all layers

    @property
    def other_parameters(self) -> int:
        """Everything but routed and shared experts."""
        return self.embedding + self.head + self.attention + self.norms + self.routers + self.dense_mlp

    @property
    def parameters(self) -> int:
        return self.other_parameters + self.shared_experts + self.routed_experts

    @property
    def parameters_per_expert(self) -> int:
        return self.routed_experts // (self.moe_layers * self.num_experts)

    @property
    def expert_bytes(self) -> int:
        """One routed expert in BF16: gate, up and down."""
        return self.parameters_per_expert * BF16_BYTES

    @property
    def every_token_parameters(self) -> int:
        """What every token is multiplied with: all but routed experts and the embedding, whose rows are looked up."""
        table = self.embedding if self.head else 0  # a tied embedding is multiplied with, as the head
        return self.other_parameters + self.shared_experts - table

    @property
    def active_parameters(self) -> int:
        """What one token is multiplied with, its top-k experts included."""
        return self.every_token_parameters + self.moe_layers * self.top_k * self.parameters_per_expert


@cache
def anatomy_of(name: str) -> Anatomy:
    """The anatomy of a model by name (as `originals.config_for` takes it).

    Raises:
        UserError: nothing by that name, or an architecture without adapter.
    """
    return anatomy(config_for(name), name)


def anatomy(config: PretrainedConfig, name: str) -> Anatomy:
    """Count the parameters of every part of the model that `config` describes.

    Raises:
        UserError: an architecture without adapter.
    """
    adapter = adapter_for(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counts = {part: sum(p.numel() for p in parameters) for part, parameters in parameters_by_part(model).items()}
    return Anatomy(
        name=name, layers=config.num_hidden_layers, moe_layers=len(adapter.moe_layers(model)),
        num_experts=adapter.num_experts(config), top_k=config.num_experts_per_tok, hidden_size=config.hidden_size,
        expert_width=adapter.expert_width(config), **counts, kv_bytes_per_token=kv_bytes_per_token(config),
    )  # fmt: skip


def parameters_by_part(model: PreTrainedModel) -> dict[str, list[nn.Parameter]]:
    """Every parameter of a model, once, under the part it belongs to: the fields of `Anatomy` that count parameters.

    Raises:
        UserError: an architecture without adapter.
    """
    layers, moe_layers = model.model.layers, adapter_for(model.config).moe_layers(model)
    modules = {  # the first part that names a parameter gets it
        "embedding": [model.get_input_embeddings()],
        "head": [model.get_output_embeddings()],
        "attention": [layer.self_attn for layer in layers],
        "routers": [layer.router for layer in moe_layers],
        "routed_experts": [layer.experts for layer in moe_layers],
        "shared_experts": [layers[layer.index].mlp for layer in moe_layers],
        "dense_mlp": [layer.mlp for layer in layers],
        "norms": [model],
    }
    taken: set[nn.Parameter] = set()
    parts = {}
    for part, of_part in modules.items():
        parts[part] = [p for module in of_part for p in module.parameters() if p not in taken]
        taken.update(parts[part])
    return parts


def kv_bytes_per_token(config: PretrainedConfig) -> int:
    """BF16 bytes that one token adds to the KV cache, all layers.

    Keys and values of every KV head; multi-head latent attention keeps the compressed latent and the rotary key
    (DeepSeek-V2, section 2.1).
    """
    if getattr(config, "kv_lora_rank", None):
        per_layer = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_layer = 2 * config.num_key_value_heads * head_dim
    return config.num_hidden_layers * per_layer * BF16_BYTES
