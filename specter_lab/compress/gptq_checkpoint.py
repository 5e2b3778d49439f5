"""A checkpoint folder in GPTQ format: packed routed experts, everything else as the source has it.

gptqmodel loads it as it is, and so does `compress.checkpoint`. For gptqmodel's sake `dynamic` says that only routed
experts are packed, and modules bear the names that transformers 5 has for them in memory, one module per expert.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from specter_lab.compress.gptq_format import FORMAT_V1, to_tensors
from specter_lab.compress.grid import CodedBank
from specter_lab.compress.tensor_names import other_tensors
from specter_lab.models.load import LoadedModel

INDEX = "model.safetensors.index.json"
EXPERTS_ONLY = {r"-:^(?!.*\.experts\.\d+\.).*": {}}  # gptqmodel: leave every module alone whose name does not match


def quantization_config(bits: int, group: int, producer: str) -> dict:
    """The `quantization_config` of config.json, as gptqmodel writes and reads it."""
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": FORMAT_V1,
        "pack_dtype": "int32",
        "dynamic": EXPERTS_ONLY,
        "meta": {"quantizer": [producer]},
    }


def _other_tensors(source: LoadedModel) -> dict[str, Tensor]:
    on_disk, in_memory = f".{source.adapter.checkpoint_block}.gate.", f".mlp.{source.adapter.router}."
    return {name.replace(on_disk, in_memory): tensor for name, tensor in other_tensors(source.path)}


def _bank_tensors(bank: CodedBank) -> dict[str, Tensor]:
    tensors = {}
    for projection in ("gate", "up", "down"):
        coded = getattr(bank, projection)
        for expert in range(coded.codes.shape[0]):
            prefix = f"model.layers.{bank.layer}.mlp.experts.{expert}.{projection}_proj"
            tensors |= {f"{prefix}.{name}": value for name, value in to_tensors(coded, expert).items()}
    return tensors


def write_gptq(
    source: LoadedModel, banks: Iterable[CodedBank], bits: int, group: int, producer: str, folder: Path
) -> None:
    """Write a whole checkpoint into `folder`, one MoE layer in memory and one file per MoE layer.

    Args:
        source: the full-precision model the banks come from.
        banks: one per MoE layer; may be a generator.
        bits: 2, 3, 4 or 8.
        group: inputs that share a scale; a row shorter than this is one group.
        producer: what made the codes, for the file's metadata.
        folder: exists already.
    """
    weight_map: dict[str, str] = {}
    total_bytes = 0

    def save(name: str, tensors: dict[str, Tensor]) -> None:
        nonlocal total_bytes
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())

    save("model-shared.safetensors", _other_tensors(source))
    layers = len(source.adapter.moe_layers(source.model))
    for bank in tqdm(banks, f"quantising {source.name}", layers, unit="layer", delay=2.0):
        save(f"model-experts-{bank.layer:03d}.safetensors", _bank_tensors(bank))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}))

    config = json.loads((source.path / "config.json").read_text())
    config["quantization_config"] = quantization_config(bits, group, producer)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        if (source.path / name).exists():
            shutil.copy(source.path / name, folder / name)
