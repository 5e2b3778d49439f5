"""What a user would do instead: memory-mapped safetensors, Accelerate's disk offload, the whole model in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import disk_offload
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import linear

from specter_lab.engine.store.reader import unmap_pages
from specter_lab.engine.zipmoe.costs import Activation, activated
from specter_lab.engine.zipmoe.model import Served, serve_experts, skeleton
from specter_lab.models.load import load, load_translator, read_config, read_tokenizer
from specter_lab.models.stacks import DROPPED, stacks_of


@dataclass(frozen=True)
class Mapped(Served):
    """A model that uses its experts in place, wherever the page cache has them."""

    experts: dict[str, Tensor]  # by their names in the checkpoint

    def unmap(self) -> None:
        """Let go of all pages used so far, so that they can be dropped."""
        for tensor in self.experts.values():
            unmap_pages(tensor.data_ptr(), tensor.nbytes)


def open_mapped(checkpoint: Path, store: Path) -> Mapped:
    """A model whose experts are used in place from the memory-mapped checkpoint; the page cache decides what stays.

    Everything but the experts comes from `store`, as in the runtime.
    """
    config = read_config(checkpoint)
    stacks = stacks_of(config)
    blocks = {block.number: block for block in stacks.blocks}
    experts = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            experts |= {name: file.get_tensor(name) for name in file.keys() if ".experts." in name}

    @torch.inference_mode()
    def serve(layer: int, hidden: Tensor, indices: Tensor, weights: Tensor, activation: Activation) -> Tensor:
        result = torch.zeros_like(hidden)
        for expert in indices[indices != DROPPED].unique().tolist():
            tokens, slots = torch.where(indices == expert)
            *inner, last = (experts[key] for key in stacks.keys(blocks[layer], expert))
            between = activated([linear(hidden[tokens], matrix) for matrix in inner], activation)
            out = linear(between, last) * weights[tokens, slots, None]
            result.index_add_(0, tokens, out.to(result.dtype))
        return result

    model = skeleton(store)
    serve_experts(model, serve)
    return Mapped(model, read_tokenizer(checkpoint, config.vocab_size), None, experts)


def open_accelerate(checkpoint: Path, folder: Path) -> Served:
    """The model with Accelerate's disk offload of its expert modules, each read whole for every call.

    A module is all experts of a layer where the class fuses them, a single matrix where it does not (Switch).
    `folder` gets Accelerate's own files, as large as the experts; they are written from the whole model in memory.
    """
    loaded = in_memory(checkpoint)
    for block, module in stacks_of(loaded.model.config).sparse(loaded.model).items():
        part = folder / f"layer-{block.number}"
        part.mkdir(parents=True, exist_ok=True)
        disk_offload(module.experts, str(part), execution_device=torch.device("cpu"))
    return Served(loaded.model, loaded.tokenizer, None)


def in_memory(checkpoint: Path) -> Served:
    """The whole model in BF16, by the loop over experts: what every other way of serving it must equal."""
    reads = load_translator if read_config(checkpoint).is_encoder_decoder else load
    loaded = reads(str(checkpoint), dtype=torch.bfloat16)
    loaded.model.set_experts_implementation("eager")
    return Served(loaded.model, loaded.tokenizer, None)
