"""One adapter per architecture: where the router, the routed experts and everything untouchable live.

An adapter is data, not code. To support another architecture, add a file here that defines `ADAPTER` (those beside
this one are examples, and the error for a model without one shows a filled-in start) and name it in `ARCHITECTURES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from specter_lab.errors import UserError

# File names in this folder = `model_type` in config.json.
ARCHITECTURES = ("qwen2_moe", "phimoe", "deepseek_v2", "mixtral", "olmoe", "qwen3_moe")

# What config.json calls routed experts per layer and the width of one, over all architectures seen so far.
EXPERTS_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
WIDTH_FIELDS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")


@dataclass(frozen=True)
class MoELayer:
    """The parts of one MoE layer, as modules of a live model."""

    index: int  # decoder layer, counted from 0, dense layers included
    router: nn.Module  # [T, H] -> (logits [T, E], weights [T, k], indices [T, k])
    experts: nn.Module  # .gate_up_proj [E, 2I, H], .down_proj [E, H, I]


@dataclass(frozen=True)
class Adapter:
    """How one architecture names things, in memory (transformers 5) and in checkpoints."""

    model_type: str
    router: str  # attribute of the MoE block that picks the experts
    experts_field: str  # config field: routed experts per layer
    width_field: str  # config field: intermediate width of one routed expert
    checkpoint_block: str  # "mlp" or "block_sparse_moe", in checkpoints on disk
    gate_up_down: tuple[str, str, str]  # the three projections of an expert, in checkpoints on disk
    gguf_architecture: str  # `general.architecture` in GGUF files

    def moe_layers(self, model: PreTrainedModel) -> list[MoELayer]:
        """All MoE layers of `model`, in order; dense layers are skipped."""
        blocks = ((i, layer.mlp) for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts"))
        return [MoELayer(i, getattr(block, self.router), block.experts) for i, block in blocks]

    def num_experts(self, config: PretrainedConfig) -> int:
        return getattr(config, self.experts_field)

    def expert_width(self, config: PretrainedConfig) -> int:
        return getattr(config, self.width_field)

    def expert_key(self, layer: int, expert: int, projection: str) -> str:
        """Checkpoint prefix of one expert matrix; `projection` is "gate", "up" or "down"."""
        name = dict(zip(("gate", "up", "down"), self.gate_up_down))[projection]
        return f"model.layers.{layer}.{self.checkpoint_block}.experts.{expert}.{name}"


def adapter_for(config: PretrainedConfig) -> Adapter:
    """The adapter of a model's architecture.

    Raises:
        UserError: there is none; the message says which file to add, and what to begin it with, or that the model is
            dense.
    """
    model_type = config.model_type
    if model_type not in ARCHITECTURES:
        if not any(hasattr(config, name) for name in EXPERTS_FIELDS):
            raise UserError(f"'{model_type}' is a dense model, as far as config.json tells (it has none of "
                            f"{', '.join(EXPERTS_FIELDS)}): it routes nothing, so give a Mixture-of-Experts model")  # fmt: skip
        raise UserError(
            f"no adapter for architecture '{model_type}': add specter_lab/models/adapters/{model_type}.py, name it in "
            f"ARCHITECTURES of __init__.py there (known: {', '.join(ARCHITECTURES)}), and begin it with\n\n"
            f"{_template(config)}"
        )
    return import_module(f"{__name__}.{model_type}").ADAPTER


def _template(config: PretrainedConfig) -> str:
    """An adapter file to start from, filled in as far as config.json tells."""
    experts = next(name for name in EXPERTS_FIELDS if hasattr(config, name))
    width = next((name for name in WIDTH_FIELDS if hasattr(config, name)), None)
    return f"""    from specter_lab.models.adapters import Adapter

    ADAPTER = Adapter(
        model_type="{config.model_type}",
        router="gate",  # a guess: the attribute of layer.mlp that returns (logits, weights, indices)
        experts_field="{experts}",  # config.json has it
        width_field="{width or "?"}",
        checkpoint_block="mlp",  # this and the next: as the keys in model.safetensors.index.json have it
        gate_up_down=("gate_proj", "up_proj", "down_proj"),
        gguf_architecture="{config.model_type.replace("_", "")}",  # a guess: as in gguf.MODEL_ARCH_NAMES
    )"""
