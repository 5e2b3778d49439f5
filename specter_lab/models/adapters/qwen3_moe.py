"""Qwen3-MoE: softmax top-8 of 128, renormalised where the configuration says so, no shared expert."""

from specter_lab.models.adapters import Adapter

ADAPTER = Adapter(
    model_type="qwen3_moe",
    router="gate",
    experts_field="num_experts",
    width_field="moe_intermediate_size",
    checkpoint_block="mlp",
    gate_up_down=("gate_proj", "up_proj", "down_proj"),
    gguf_architecture="qwen3moe",
)
