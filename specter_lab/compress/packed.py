"""Reading GPTQ and AWQ checkpoints in safetensors: this project's, gptqmodel's, AutoGPTQ's and AutoAWQ's."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specter_lab.compress import gptq_format
from specter_lab.compress.awq import dequantize_awq
from specter_lab.compress.stored import StoredExperts, StoredProjection, unused_note
from specter_lab.compress.tensor_names import EXPERT, PROJECTIONS, ROUTER
from specter_lab.errors import UserError
from specter_lab.models.load import LoadedModel

_PACKED = ("qweight", "qzeros", "scales", "g_idx")
_LAYOUTS = {"gptq": (gptq_format.FORMAT_V1, gptq_format.FORMAT_V2), "awq": ("gemm",)}
Tensors = dict[str, safe_open]  # full tensor name -> the open file that holds it


def _open(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = safe_open(path, framework="pt")
        tensors.update(dict.fromkeys(file.keys(), file))
    if not tensors:
        raise UserError(f"no .safetensors or .gguf files in {folder}: this folder is not a quantised checkpoint")
    return tensors


def _quantization_config(folder: Path) -> dict:
    try:
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} has no readable quantization_config in config.json: it is not a quantised "
                        f"checkpoint, or its config.json is missing") from error  # fmt: skip
    method = config.get("quant_method")
    if method not in _LAYOUTS:
        raise UserError(f"{folder} is quantised by '{method}': only gptq, awq and GGUF can be read")
    if _layout(config) not in _LAYOUTS[method]:
        raise UserError(f"{folder} packs {method} codes as '{_layout(config)}': only {' and '.join(_LAYOUTS[method])} "
                        f"can be read")  # fmt: skip
    return config


def _layout(config: dict) -> str:
    """How codes are packed; producers disagree on where to say it, and not to say it means the oldest layout."""
    keys = ("version",) if config["quant_method"] == "awq" else ("checkpoint_format", "format")
    return next((config[key].lower() for key in keys if key in config), _LAYOUTS[config["quant_method"]][0])


def _bits(config: dict) -> int:
    return config["bits"] if "bits" in config else config["w_bit"]  # AutoAWQ calls it w_bit in older files


def _refuse_quantized_router(folder: Path, stored: Tensors) -> None:
    for name in stored:
        if (match := ROUTER.search(name)) and match[3] in _PACKED:
            raise UserError(
                f"{folder}: the router '{name.rpartition('.')[0]}' is quantised, so this is another model's routing: "
                f"use a checkpoint whose routers are in full precision"
            )


def open_packed(folder: Path, source: LoadedModel) -> StoredExperts:
    """The routed experts of a GPTQ or AWQ checkpoint folder.

    Raises:
        UserError: not such a checkpoint, a damaged file, an incomplete expert, or a quantised router.
    """
    try:
        stored = _open(folder)
    except SafetensorError as error:
        raise UserError(f"{folder} has a damaged file ({error}): fetch or make it again") from error
    config = _quantization_config(folder)
    _refuse_quantized_router(folder, stored)
    quantizer = f"{config['quant_method']}-int{_bits(config)}"
    others = [name for name in stored if name.endswith(".qweight") and not EXPERT.search(name)]
    notes = (unused_note(others),) if others else ()
    return StoredExperts(quantizer, notes, _projections(folder, stored, config, source))


def _projections(folder: Path, stored: Tensors, config: dict, source: LoadedModel) -> Iterator[StoredProjection]:
    experts: dict[tuple[int, str], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in stored:
        if (match := EXPERT.search(name)) and match[4] in _PACKED:
            experts[int(match[1]), PROJECTIONS[match[3]]][int(match[2])].append(name)
    for (layer, projection), names_of in sorted(experts.items()):
        if missing := sorted(set(range(source.num_experts)) - names_of.keys()):
            raise UserError(f"{folder}: {projection} of expert {missing[0]} in layer {layer} is missing: "
                            f"{source.name} has {source.num_experts} experts in every layer")  # fmt: skip
        read = [_read_matrix(folder, stored, names, config) for _, names in sorted(names_of.items())]
        weights, stored_bytes = zip(*read)
        if len({matrix.shape for matrix in weights}) > 1:
            raise UserError(f"{folder}: {projection} in layer {layer} has experts of several shapes: the file is "
                            f"damaged, fetch or make it again")  # fmt: skip
        yield StoredProjection(layer, projection, torch.stack(weights), sum(stored_bytes))


def _read_matrix(folder: Path, stored: Tensors, names: list[str], config: dict) -> tuple[Tensor, int]:
    """Effective float32 weights [out, in] of one linear layer, given its tensors' names, and their stored bytes."""
    try:
        tensors = {name.rpartition(".")[2]: stored[name].get_tensor(name) for name in names}
        return _effective(tensors, config), _stored_bytes(tensors)
    except (SafetensorError, KeyError, RuntimeError, ValueError, IndexError) as error:
        raise UserError(f"{folder}: '{names[0].rpartition('.')[0]}' cannot be read ({error}): the file is damaged, "
                        f"fetch or make it again") from error  # fmt: skip


def _effective(tensors: dict[str, Tensor], config: dict) -> Tensor:
    if config["quant_method"] == "awq":
        return dequantize_awq(tensors["qweight"], tensors["qzeros"], tensors["scales"], _bits(config))
    return gptq_format.dequantize(tensors, _layout(config))


def _stored_bytes(tensors: dict[str, Tensor]) -> int:
    """Codes, scales and zero points; the group index only when it says more than 'in order'."""
    in_order = "g_idx" not in tensors or bool((tensors["g_idx"].diff() >= 0).all())
    return sum(tensor.nbytes for name, tensor in tensors.items() if not (name == "g_idx" and in_order))
