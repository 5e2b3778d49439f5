"""Mixtral: top-2 of 8, weights renormalised over the chosen experts, no shared expert."""

from specter_lab.models.adapters import Adapter

ADAPTER = Adapter(
    model_type="mixtral",
    router="gate",
    experts_field="num_local_experts",
    width_field="intermediate_size",
    checkpoint_block="block_sparse_moe",
    gate_up_down=("w1", "w3", "w2"),
    gguf_architecture="llama",  # llama.cpp has no name of its own for it
)
