"""What a user would do instead: memory-mapped safetensors, Accelerate's disk offload; and who is not installed here."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import disk_offload
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import linear

from specter_lab.engine.zipmoe.costs import Activation
from specter_lab.engine.zipmoe.model import Served, serve_experts, skeleton
from specter_lab.models.adapters import adapter_for
from specter_lab.models.load import load, read_config, read_tokenizer

PEERS = {  # name -> package, what it needs
    "DeepSpeed ZeRO-3": ("deepspeed", "a CUDA GPU and its NVMe offload"),
    "MoE-Infinity": ("moe_infinity", "a CUDA GPU"),
}


def open_mapped(checkpoint: Path, store: Path) -> Served:
    """A model whose experts are used in place from the memory-mapped checkpoint; the page cache decides what stays.

    Everything but the experts comes from `store`, as in the runtime.
    """
    config = read_config(checkpoint)
    adapter = adapter_for(config)
    experts = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            experts |= {name: file.get_tensor(name) for name in file.keys() if ".experts." in name}

    @torch.inference_mode()
    def serve(layer: int, hidden: Tensor, indices: Tensor, weights: Tensor, activation: Activation) -> Tensor:
        result = torch.zeros_like(hidden)
        for expert in indices.unique().tolist():
            tokens, slots = torch.where(indices == expert)
            rows = hidden[tokens]
            gate, up, down = (experts[adapter.expert_key(layer, expert, p) + ".weight"] for p in ("gate", "up", "down"))
            out = linear(activation(linear(rows, gate)) * linear(rows, up), down) * weights[tokens, slots, None]
            result.index_add_(0, tokens, out.to(result.dtype))
        return result

    model = skeleton(store)
    serve_experts(model, serve)
    return Served(model, read_tokenizer(checkpoint, config.vocab_size), None)


def open_accelerate(checkpoint: Path, folder: Path) -> Served:
    """The model with Accelerate's disk offload of its expert modules: a layer's experts are read whole for every call.

    `folder` gets Accelerate's own files, as large as the experts; they are written from the whole model in memory.
    """
    loaded = load(str(checkpoint), dtype=torch.bfloat16)
    loaded.model.set_experts_implementation("eager")
    for layer in loaded.adapter.moe_layers(loaded.model):
        part = folder / f"layer-{layer.index}"
        part.mkdir(parents=True, exist_ok=True)
        disk_offload(layer.experts, str(part), execution_device=torch.device("cpu"))
    return Served(loaded.model, loaded.tokenizer, None)


def why_not_run(peer: str) -> str:
    """Why a system of the paper's comparison has no row."""
    package, needs = PEERS[peer]
    if find_spec(package) is None:
        return f"not run: {package} is not installed and needs {needs}"
    return f"not run: {package} is installed, but nobody has tried it here; it needs {needs}"
