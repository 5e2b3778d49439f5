"""Reading GPTQ and AWQ checkpoints in safetensors: this project's, gptqmodel's, AutoGPTQ's and AutoAWQ's.

`open_packed` gives effective weights, for models that compute with any; `int4_stored` takes the codes as they are.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

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
Converted = TypeVar("Converted")
Tensors = dict[str, safe_open]  # full tensor name -> the open file that holds it


@dataclass(frozen=True)
class Packed:
    """An open checkpoint folder: nothing but names is read yet."""

    folder: Path
    tensors: Tensors
    config: dict  # quantization_config

    @property
    def method(self) -> str:
        return self.config["quant_method"]

    @property
    def layout(self) -> str:
        return _layout(self.config)

    @property
    def bits(self) -> int:
        return self.config["bits"] if "bits" in self.config else self.config["w_bit"]  # w_bit: older AutoAWQ


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


def _refuse_quantized_router(folder: Path, stored: Tensors) -> None:
    for name in stored:
        if (match := ROUTER.search(name)) and match[3] in _PACKED:
            raise UserError(
                f"{folder}: the router '{name.rpartition('.')[0]}' is quantised, so this is another model's routing: "
                f"use a checkpoint whose routers are in full precision"
            )


def open_folder(folder: Path) -> Packed:
    """A GPTQ or AWQ checkpoint folder.

    Raises:
        UserError: not such a checkpoint, a damaged file, or a quantised router.
    """
    try:
        stored = _open(folder)
    except SafetensorError as error:
        raise UserError(f"{folder} has a damaged file ({error}): fetch or make it again") from error
    config = _quantization_config(folder)
    _refuse_quantized_router(folder, stored)
    return Packed(folder, stored, config)


def experts_of(packed: Packed, num_experts: int, model: str) -> dict[tuple[int, str], list[list[str]]]:
    """(decoder layer, projection) -> of every expert, in order, the names of its tensors.

    Raises:
        UserError: one of the `num_experts` experts that `model` has in a layer is missing.
    """
    found: dict[tuple[int, str], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in packed.tensors:
        if (match := EXPERT.search(name)) and match[4] in _PACKED:
            found[int(match[1]), PROJECTIONS[match[3]]][int(match[2])].append(name)
    for (layer, projection), names_of in found.items():
        if missing := sorted(set(range(num_experts)) - names_of.keys()):
            raise UserError(f"{packed.folder}: {projection} of expert {missing[0]} in layer {layer} is missing: "
                            f"{model} has {num_experts} experts in every layer")  # fmt: skip
    return {where: [names for _, names in sorted(names_of.items())] for where, names_of in sorted(found.items())}


def read_matrix(packed: Packed, names: list[str], convert: Callable[[dict[str, Tensor]], Converted]) -> Converted:
    """What `convert` makes of one linear layer's tensors, which it gets by their last names.

    Raises:
        UserError: the file is damaged, or a tensor that `convert` asks for is missing.
    """
    try:
        return convert({name.rpartition(".")[2]: packed.tensors[name].get_tensor(name) for name in names})
    except (SafetensorError, KeyError, RuntimeError, ValueError, IndexError) as error:
        raise UserError(f"{packed.folder}: '{names[0].rpartition('.')[0]}' cannot be read ({error}): the file is damaged, "
                        f"fetch or make it again") from error  # fmt: skip


def open_packed(folder: Path, source: LoadedModel) -> StoredExperts:
    """The effective weights of the routed experts in a GPTQ or AWQ checkpoint folder.

    Raises:
        UserError: as `open_folder`, or an incomplete expert.
    """
    packed = open_folder(folder)
    others = [name for name in packed.tensors if name.endswith(".qweight") and not EXPERT.search(name)]
    notes = (unused_note(others),) if others else ()
    return StoredExperts(f"{packed.method}-int{packed.bits}", notes, _projections(packed, source))


def _projections(packed: Packed, source: LoadedModel) -> Iterator[StoredProjection]:
    for (layer, projection), experts in experts_of(packed, source.num_experts, source.name).items():
        read = [read_matrix(packed, names, partial(_effective, packed)) for names in experts]
        weights, stored_bytes = zip(*read)
        if len({matrix.shape for matrix in weights}) > 1:
            raise UserError(f"{packed.folder}: {projection} in layer {layer} has experts of several shapes: the file is "
                            f"damaged, fetch or make it again")  # fmt: skip
        yield StoredProjection(layer, projection, torch.stack(weights), sum(stored_bytes))


def _effective(packed: Packed, tensors: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Effective float32 weights [out, in] of one linear layer, and their stored bytes."""
    if packed.method == "awq":
        weights = dequantize_awq(tensors["qweight"], tensors["qzeros"], tensors["scales"], packed.bits)
    else:
        weights = gptq_format.dequantize(tensors, packed.layout)
    return weights, _stored_bytes(tensors)


def _stored_bytes(tensors: dict[str, Tensor]) -> int:
    """Codes, scales and zero points; the group index only when it says more than 'in order'."""
    in_order = "g_idx" not in tensors or bool((tensors["g_idx"].diff() >= 0).all())
    return sum(tensor.nbytes for name, tensor in tensors.items() if not (name == "g_idx" and in_order))
