"""Where routed experts lie in a model's stacks of layers, decoder-only or encoder-decoder: data that storing and serving ask.

Layers are numbered through, an encoder's before the decoder's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specter_lab.errors import UserError
from specter_lab.models.adapters import adapter_for

DROPPED = -1  # in place of an expert: the router's capacity was used up, and nobody computes the token


@dataclass(frozen=True)
class Block:
    """The feed-forward part of one layer, which may be one of routed experts."""

    number: int  # of all layers
    stack: str  # "encoder" or "decoder"
    index: int  # in its stack
    in_memory: str  # name of the module
    on_disk: str  # prefix of its tensors in a checkpoint


@dataclass(frozen=True)
class Stacks:
    """A model's layers and how their experts are named and chosen."""

    blocks: tuple[Block, ...]  # dense ones included
    router: str  # a block's module that chooses
    one_hot: bool  # the router answers first with a mask [.., E] instead of last with indices [T, k]
    expert: str  # name of an expert in a checkpoint, with its number as {}
    matrices: tuple[str, ...]  # an expert's, the last its output; before it one, or a gate's and one
    activation: str  # name
    num_experts: int  # per layer
    top_k: int
    renamed: tuple[tuple[str, str], ...] = ()  # parts of a tensor's name on disk -> in memory

    def keys(self, block: Block, expert: int) -> list[str]:
        """Names of an expert's matrices in a checkpoint, in the order of `matrices`."""
        return [f"{block.on_disk}.experts.{self.expert.format(expert)}.{matrix}.weight" for matrix in self.matrices]

    def sparse(self, model: PreTrainedModel) -> dict[Block, nn.Module]:
        """The blocks with experts, as modules of a live model that has `.experts`."""
        modules = {block: model.get_submodule(block.in_memory) for block in self.blocks}
        return {block: module for block, module in modules.items() if hasattr(module, "experts")}

    def indices(self, chosen: Tensor) -> Tensor:
        """[T, k] experts, or DROPPED, from what a block hands to its experts."""
        if not self.one_hot:
            return chosen
        return torch.where(chosen.any(-1), chosen.argmax(-1), DROPPED).reshape(-1, 1)

    def route(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """[T, k] experts that a block's router chooses for hidden states [T, H]."""
        router = getattr(module, self.router)
        return self.indices(router(hidden[None])[0]) if self.one_hot else router(hidden)[2]

    def name_in_memory(self, name: str) -> str:
        """The name that a checkpoint's tensor has in the model."""
        for on_disk, in_memory in self.renamed:
            name = name.replace(on_disk, in_memory)
        return name


def stacks_of(config: PretrainedConfig) -> Stacks:
    """The layers of the model that `config` describes.

    Raises:
        UserError: an architecture without adapter, or an encoder-decoder of another class than SwitchTransformers.
    """
    if config.model_type == "switch_transformers":
        return _switch(config)
    if config.is_encoder_decoder:
        raise UserError(f"experts of a {config.model_type} model are not served: the encoder-decoders that are have class "
                        f"switch_transformers")  # fmt: skip
    adapter = adapter_for(config)
    on_disk = adapter.checkpoint_block
    return Stacks(
        blocks=tuple(
            Block(i, "decoder", i, f"model.layers.{i}.mlp", f"model.layers.{i}.{on_disk}")
            for i in range(config.num_hidden_layers)
        ),
        router=adapter.router, one_hot=False, expert="{}", matrices=adapter.gate_up_down, activation=config.hidden_act,
        num_experts=adapter.num_experts(config), top_k=config.num_experts_per_tok,
        renamed=((f".{on_disk}.", ".mlp."), (".mlp.gate.", f".mlp.{adapter.router}.")),
    )  # fmt: skip


def _switch(config: PretrainedConfig) -> Stacks:
    """Two matrices per expert, top-1; the feed-forward part is a layer's last, after one attention or two."""
    places = [("encoder", i, f"encoder.block.{i}.layer.1.mlp") for i in range(config.num_layers)]
    places += [("decoder", i, f"decoder.block.{i}.layer.2.mlp") for i in range(config.num_decoder_layers)]
    return Stacks(
        blocks=tuple(Block(number, stack, i, name, name) for number, (stack, i, name) in enumerate(places)),
        router="router", one_hot=True, expert="expert_{}", matrices=("wi", "wo"), activation=config.dense_act_fn,
        num_experts=config.num_experts, top_k=1,
    )  # fmt: skip
