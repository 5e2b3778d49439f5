"""Phi-3.5-MoE: top-2 by sparsemixer (the second choice is made with the first masked out), no shared expert."""

from specter_lab.models.adapters import Adapter

ADAPTER = Adapter(
    model_type="phimoe",
    router="router",
    experts_field="num_local_experts",
    width_field="intermediate_size",
    checkpoint_block="block_sparse_moe",
    gate_up_down=("w1", "w3", "w2"),
    gguf_architecture="phimoe",
)
