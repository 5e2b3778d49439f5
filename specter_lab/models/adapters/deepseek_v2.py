"""DeepSeek-V2: multi-head latent attention, first layers dense, two shared experts fused into one MLP."""

from specter_lab.models.adapters import Adapter

ADAPTER = Adapter(
    model_type="deepseek_v2",
    router="gate",
    experts_field="n_routed_experts",
    width_field="moe_intermediate_size",
    checkpoint_block="mlp",
    gate_up_down=("gate_proj", "up_proj", "down_proj"),
    gguf_architecture="deepseek2",
)
