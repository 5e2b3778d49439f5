"""One row per model: the numbers everything else is checked against or scaled to."""

from __future__ import annotations

from dataclasses import dataclass

BF16_BYTES = 2


@dataclass(frozen=True)
class Geometry:
    """Shape of a decoder MoE. Sources: the models' published config.json."""

    name: str
    hub_id: str | None  # None: trained by this project, shipped in data/zoo
    model_type: str
    moe_layers: int
    dense_layers: int
    num_experts: int
    top_k: int
    shared_experts: int
    hidden_size: int
    expert_width: int
    parameters: int  # exact, tied embeddings counted once

    @property
    def expert_bytes(self) -> int:
        """One routed expert in BF16: gate, up and down."""
        return 3 * self.hidden_size * self.expert_width * BF16_BYTES

    @property
    def all_experts_bytes(self) -> int:
        return self.moe_layers * self.num_experts * self.expert_bytes


GEOMETRY = {
    row.name: row
    for row in (
        Geometry("Qwen1.5-MoE-A2.7B", "Qwen/Qwen1.5-MoE-A2.7B", "qwen2_moe", 24, 0, 60, 4, 1, 2048, 1408, 14_315_784_192),
        Geometry("Phi-3.5-MoE", "microsoft/Phi-3.5-MoE-instruct", "phimoe", 32, 0, 16, 2, 0, 4096, 6400, 41_873_153_344),
        Geometry("DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V2-Lite", "deepseek_v2", 26, 1, 64, 6, 2, 2048, 1408, 15_706_484_224),
        Geometry("Mixtral-8x7B", "mistralai/Mixtral-8x7B-v0.1", "mixtral", 32, 0, 8, 2, 0, 4096, 14336, 46_702_792_704),
        Geometry("qwen-nano", None, "qwen2_moe", 4, 0, 60, 4, 1, 256, 32, 7_932_160),
        Geometry("phi-nano", None, "phimoe", 5, 0, 16, 2, 0, 256, 64, 5_469_440),
        Geometry("deepseek-nano", None, "deepseek_v2", 3, 1, 64, 6, 2, 256, 32, 6_801_920),
        Geometry("dense-nano", None, "qwen2_moe", 4, 0, 1, 1, 1, 256, 128, 2_366_720),
    )
}  # fmt: skip
