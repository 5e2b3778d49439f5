"""Qwen1.5-MoE and Qwen2-MoE: softmax top-k without renormalisation, one gated shared expert."""

from specter_lab.models.adapters import Adapter

ADAPTER = Adapter(
    model_type="qwen2_moe",
    router="gate",
    experts_field="num_experts",
    width_field="moe_intermediate_size",
    checkpoint_block="mlp",
    gate_up_down=("gate_proj", "up_proj", "down_proj"),
    gguf_architecture="qwen2moe",
)
