"""What the engine needs to know of a model's config, in one vocabulary for all architectures."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from specter_lab.errors import UserError
from specter_lab.models.adapters import adapter_for

ENGINE_ARCHITECTURES = ("qwen2_moe", "phimoe", "deepseek_v2")


@dataclass(frozen=True)
class Shape:
    """A decoder MoE; widths in elements."""

    model_type: str
    layers: int  # decoder layers, dense ones included
    moe_layers: tuple[int, ...]  # which of them route
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    key_dim: int  # of one head, rotary part included
    value_dim: int
    rotary_dim: int  # the last part of a key that is rotated (all of it but with latent attention)
    latent: int  # width of the compressed keys and values; 0: grouped-query attention
    num_experts: int
    top_k: int
    expert_width: int
    norm_eps: float
    rope_theta: float
    router_jitter: float  # Phi's sparsemixer
    router_scale: float
    normalized: bool  # routing weights are divided by their sum

    @property
    def expert_numel(self) -> int:
        """Elements of one routed expert: gate, up and down."""
        return 3 * self.hidden * self.expert_width


def shape_of(config: PretrainedConfig) -> Shape:
    """The shape a config describes.

    Raises:
        UserError: an architecture or a rotary embedding the engine has no code for.
    """
    if config.model_type not in ENGINE_ARCHITECTURES:
        raise UserError(f"the engine runs {', '.join(ENGINE_ARCHITECTURES)}, not {config.model_type}: measure it instead "
                        f"(specter-lab measure), or add its attention and router to engine/decoder.py")  # fmt: skip
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": config.rope_theta}
    unsupported = [
        (rope["rope_type"] != "default", f"rotary embedding of type '{rope['rope_type']}'"),
        (getattr(config, "use_sliding_window", False), "sliding-window attention"),
        (getattr(config, "q_lora_rank", None), "compressed queries (q_lora_rank)"),
        (getattr(config, "topk_method", "greedy") != "greedy", f"routing by {getattr(config, 'topk_method', '')}"),
    ]
    for present, what in unsupported:
        if present:
            raise UserError(f"the engine has no {what}: this checkpoint can be measured but not served")
    adapter = adapter_for(config)
    latent = getattr(config, "kv_lora_rank", None) or 0
    head_dim = config.hidden_size // config.num_attention_heads if latent else getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    dense = getattr(config, "first_k_dense_replace", 0)
    return Shape(
        model_type=config.model_type, layers=config.num_hidden_layers,
        moe_layers=tuple(range(dense, config.num_hidden_layers)), vocab=config.vocab_size, hidden=config.hidden_size,
        heads=config.num_attention_heads, kv_heads=config.num_key_value_heads,
        key_dim=config.qk_nope_head_dim + config.qk_rope_head_dim if latent else head_dim,
        value_dim=config.v_head_dim if latent else head_dim,
        rotary_dim=config.qk_rope_head_dim if latent else head_dim, latent=latent,
        num_experts=adapter.num_experts(config), top_k=config.num_experts_per_tok,
        expert_width=adapter.expert_width(config), norm_eps=config.rms_norm_eps, rope_theta=rope["rope_theta"],
        router_jitter=getattr(config, "router_jitter_noise", 0.0),
        router_scale=getattr(config, "routed_scaling_factor", 1.0), normalized=getattr(config, "norm_topk_prob", False),
    )  # fmt: skip
