"""Shapes of the zoo: the originals' classes and routing geometry at widths that train in minutes.

Head dimensions (128; MLA 128 + 64), experts, top-k and shared experts are the originals'; model width, expert width
and head counts are divided. Every divided size divides the original's, so that tiling the weights reaches
the full geometry exactly: expert width 32 x 44 = 1408 (Qwen, DeepSeek), 64 x 100 = 6400 (Phi).
A *proxy* has the original's depth as well; proxies are trained by the same recipe and not shipped. `dense-nano` is the
dense control: qwen-nano's active width (4 experts of 32, shared 128) in one expert that every token uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import DeepseekV2Config, PhimoeConfig, PretrainedConfig, Qwen2MoeConfig

VOCAB_SIZE = 2048
MAX_POSITIONS = 2048


@dataclass(frozen=True)
class ZooShape:
    """One trainable member of the zoo."""

    name: str
    original: str  # row of the geometry table whose routing it has
    config: PretrainedConfig


def _common(layers: int, heads: int, kv_heads: int) -> dict:
    return dict(
        vocab_size=VOCAB_SIZE, hidden_size=256, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=MAX_POSITIONS, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.02,
    )  # fmt: skip


def _qwen(name: str, layers: int, experts: int = 60, top_k: int = 4, expert_width: int = 32) -> ZooShape:
    config = Qwen2MoeConfig(
        **_common(layers, heads=2, kv_heads=2), moe_intermediate_size=expert_width, intermediate_size=128,
        shared_expert_intermediate_size=128, num_experts=experts, num_experts_per_tok=top_k, norm_topk_prob=False,
        decoder_sparse_step=1,
    )  # fmt: skip
    return ZooShape(name, "Qwen1.5-MoE-A2.7B", config)


def _phi(name: str, layers: int) -> ZooShape:
    config = PhimoeConfig(
        **_common(layers, heads=2, kv_heads=1), intermediate_size=64, num_local_experts=16, num_experts_per_tok=2,
        attention_bias=True, lm_head_bias=False, router_jitter_noise=0.01, input_jitter_noise=0.0,
    )  # fmt: skip
    return ZooShape(name, "Phi-3.5-MoE", config)


def _deepseek(name: str, layers: int) -> ZooShape:
    config = DeepseekV2Config(
        **_common(layers, heads=2, kv_heads=2), intermediate_size=576, moe_intermediate_size=32, n_routed_experts=64,
        num_experts_per_tok=6, n_shared_experts=2, first_k_dense_replace=1, kv_lora_rank=64, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_group=1, topk_group=1, topk_method="greedy",
        routed_scaling_factor=1.0, norm_topk_prob=False,
    )  # fmt: skip
    return ZooShape(name, "DeepSeek-V2-Lite", config)


SHAPES = {
    shape.name: shape
    for shape in (
        _qwen("dense-nano", 4, experts=1, top_k=1, expert_width=128), _qwen("qwen-nano", 4), _phi("phi-nano", 5), _deepseek("deepseek-nano", 4),
        _qwen("qwen-proxy", 24), _phi("phi-proxy", 32), _deepseek("deepseek-proxy", 27),
    )
}  # fmt: skip
