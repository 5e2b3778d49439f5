"""Configurations of the papers' models, so that sizes can be computed exactly where there is no model hub.

Sources: the config.json published with each checkpoint, of which only fields that decide a tensor's shape are kept
here; a test builds the tensors and compares their number with the geometry row.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, DeepseekV2Config, MixtralConfig, PhimoeConfig, PretrainedConfig, Qwen2MoeConfig

from specter_lab.errors import UserError
from specter_lab.models.geometry import GEOMETRY
from specter_lab.models.load import ZOO_MODELS, resolve

ORIGINALS: dict[str, PretrainedConfig] = {
    "Qwen1.5-MoE-A2.7B": Qwen2MoeConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16,
        intermediate_size=5632, moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts=60,
        num_experts_per_tok=4, decoder_sparse_step=1, norm_topk_prob=False, max_position_embeddings=8192,
        tie_word_embeddings=False,
    ),
    "Phi-3.5-MoE": PhimoeConfig(
        vocab_size=32064, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=6400, num_local_experts=16, num_experts_per_tok=2, attention_bias=True, lm_head_bias=True,
        max_position_embeddings=131072, tie_word_embeddings=False,
    ),
    "DeepSeek-V2-Lite": DeepseekV2Config(
        vocab_size=102400, hidden_size=2048, num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16,
        intermediate_size=10944, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, max_position_embeddings=163840, tie_word_embeddings=False,
    ),
    "Mixtral-8x7B": MixtralConfig(
        vocab_size=32000, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32768,
        tie_word_embeddings=False,
    ),
}  # fmt: skip


def config_for(name: str) -> PretrainedConfig:
    """Configuration of a model by name, without its weights.

    Args:
        name: one of the papers' models (geometry name or hub id; no network needed), a zoo name, a folder, or any
            other hub id, of which config.json alone is fetched.

    Raises:
        UserError: nothing by that name can be found here.
    """
    for row in GEOMETRY.values():
        if row.name in ORIGINALS and name in (row.name, row.hub_id):
            return ORIGINALS[row.name]
    if name in ZOO_MODELS or Path(name).is_dir() or "/" not in name or name.startswith((".", "/")):
        folder = resolve(name)
        if not (folder / "config.json").exists():
            raise UserError(f"no config.json in {folder}: this folder is not a checkpoint")
        return AutoConfig.from_pretrained(folder)
    from huggingface_hub import hf_hub_download

    try:
        return AutoConfig.from_pretrained(Path(hf_hub_download(name, "config.json")).parent)
    except Exception as error:  # the hub client raises a dozen types for "not reachable"
        raise UserError(
            f"cannot fetch the config.json of '{name}' from the model hub ({type(error).__name__}): give a folder that "
            f"holds one instead"
        ) from error
