"""OLMoE: softmax top-8 of 64 without renormalisation, queries and keys normalised, no shared expert."""

from specter_lab.models.adapters import Adapter

ADAPTER = Adapter(
    model_type="olmoe",
    router="gate",
    experts_field="num_experts",
    width_field="intermediate_size",
    checkpoint_block="mlp",
    gate_up_down=("gate_proj", "up_proj", "down_proj"),
    gguf_architecture="olmoe",
)
