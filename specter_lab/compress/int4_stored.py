"""The codes of a quantised checkpoint, read as they are into the INT4 layout: no code is unpacked, no weight becomes a float.

A GPTQ word holds eight inputs of one output, the first in its lowest bits, each as code + 8. So its words, transposed, are the
INT4 layout byte for byte, and what is read is what will lie on the GPU:

    qweight [in / 8, out] int32  ->  [out, in / 8] int32 = [out, in / 2] uint8        scales [G, out]  ->  [out, G]

The layout has no place for a zero point beside 8, for inputs in another order, or for a group of its own. Symmetric GPTQ (the
paper's draft) and rounding to nearest need none of them. AWQ needs a zero point for each group and a factor for each input of
gate and up; GGUF's Q4_0 a scale for every 32 inputs, 4.5 bits a weight instead of 4.125, and half of its scales are negative,
which residual transport has no code for. They are refused in a sentence, as is everything else that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specter_lab.compress.cache import verify_manifest
from specter_lab.compress.checkpoint import locate
from specter_lab.compress.gptq_format import FORMAT_V1, WORD_BITS
from specter_lab.compress.grid import GROUP, group_of
from specter_lab.compress.int4 import INT4_BITS, Int4Bank, Int4Weights
from specter_lab.compress.packed import Packed, experts_of, open_folder, read_matrix
from specter_lab.compress.quantizer import Quantizer
from specter_lab.errors import UserError

CODES_PER_WORD = WORD_BITS // INT4_BITS
# Words of eight zero points 8; version 1 stores one less.
SYMMETRIC_V1, SYMMETRIC_V2 = 0x77777777, 0x88888888 - 2**32
REMEDY = "quantise with 4 bits, symmetric, in groups of 128 and without act-order (specter-lab quantize --quantizer gptq-int4)"


@dataclass(frozen=True)
class RoutedExperts:
    """What a checkpoint must hold to be a model's draft."""

    model: str  # its name, for messages
    layers: tuple[int, ...]  # decoder layers that route
    num_experts: int
    hidden: int
    width: int  # of an expert

    def shape(self, projection: str) -> tuple[int, int]:
        """(out, in) of one expert's matrix."""
        return (self.hidden, self.width) if projection == "down" else (self.width, self.hidden)


def fits_int4(quantizer: Quantizer) -> bool:
    """Whether what a quantiser makes can be read into the INT4 layout."""
    how = quantizer.parameters
    grouped = how.get("group", GROUP) == GROUP and "type" not in how  # type: a GGUF file's
    return quantizer.bits == INT4_BITS and how.get("symmetric", True) and grouped


def open_int4(path: str | Path) -> Packed:
    """A checkpoint whose codes may fit, by its own account; no tensor is read.

    Args:
        path: folder, or hub id.

    Raises:
        UserError: not found, not a quantised checkpoint, damaged, or of another method or width.
    """
    found = locate(str(path))
    if found.is_file() and found.suffix != ".gguf":
        raise UserError(f"{found} is one file of a checkpoint: give its folder")
    if not found.is_dir() or any(found.glob("*.gguf")):
        raise UserError(f"{found} is in GGUF format, and the engine's draft has scales for groups of {GROUP}: {REMEDY}")
    packed = open_folder(found)
    if packed.method != "gptq":
        raise UserError(f"{found} is quantised by {packed.method}, whose zero points and input scales the engine's draft has no place "
                        f"for: {REMEDY}")  # fmt: skip
    if packed.bits != INT4_BITS:
        raise UserError(f"{found} has {packed.bits} bits, the engine's draft {INT4_BITS}: {REMEDY}")
    return packed


def read_int4(path: str | Path, wanted: RoutedExperts) -> Iterator[Int4Bank]:
    """The routed experts of a GPTQ checkpoint in the INT4 layout, layer by layer: one layer is in memory at a time.

    Args:
        path: folder, or hub id.
        wanted: the model that is to be drafted for.

    Raises:
        UserError: as `open_int4`, altered, incomplete, of another model, or nothing that the layout can hold.
    """
    packed = open_int4(path)
    found = packed.folder
    verify_manifest(found)
    names = experts_of(packed, wanted.num_experts, wanted.model)
    expected = {(layer, projection) for layer in wanted.layers for projection in ("gate", "up", "down")}
    if differs := sorted(expected ^ names.keys()):
        layer, projection = differs[0]
        has, lacks = (wanted.model, found) if (layer, projection) in expected else (found, wanted.model)
        raise UserError(f"{has} has routed experts in layer {layer} ({projection}), {lacks} has none there: use a whole checkpoint of "
                        f"this very model")  # fmt: skip
    if (most := max(map(len, names.values()))) > wanted.num_experts:
        raise UserError(f"{found} has {most} experts in a layer, {wanted.model} {wanted.num_experts}: use a whole checkpoint of this "
                        f"very model")  # fmt: skip
    for layer in wanted.layers:
        gate, up, down = (_stacked(packed, names[layer, part], wanted.shape(part)) for part in ("gate", "up", "down"))
        yield Int4Bank(layer, gate, up, down)


def _stacked(packed: Packed, experts: list[list[str]], shape: tuple[int, int]) -> Int4Weights:
    """One projection of all experts of a layer."""
    out, inputs = shape
    codes = torch.empty(len(experts), out, inputs // 2, dtype=torch.uint8)
    scales = torch.empty(len(experts), out, inputs // group_of(inputs), dtype=torch.float16)
    for number, names in enumerate(experts):
        where = f"{packed.folder}: '{names[0].rpartition('.')[0]}'"
        read_matrix(packed, names, partial(_put, codes[number], scales[number], packed.layout, where))
    return Int4Weights(codes, scales)


def _put(codes: Tensor, scales: Tensor, layout: str, where: str, tensors: dict[str, Tensor]) -> None:
    """One matrix into its place: codes [out, in / 2] and scales [out, G]."""
    words, zeros, stored_scales = tensors["qweight"], tensors["qzeros"], tensors["scales"]
    out, inputs, groups = len(codes), 2 * codes.shape[1], scales.shape[1]
    if stored_scales.shape[1] != out or tensors["g_idx"].numel() != inputs:
        found = tensors["g_idx"].numel(), stored_scales.shape[1]
        raise UserError(f"{where} has {found[0]} inputs and {found[1]} outputs, the model {inputs} and {out}: use a checkpoint of "
                        f"this very model")  # fmt: skip
    if words.shape != (inputs // CODES_PER_WORD, out):
        bits = words.shape[0] * WORD_BITS // inputs
        raise UserError(f"{where} has {bits} bits, the engine's draft {INT4_BITS}: {REMEDY}")
    if len(stored_scales) != groups:
        raise UserError(f"{where} has {len(stored_scales)} groups a row, the engine's draft {groups}: {REMEDY}")
    if not torch.equal(tensors["g_idx"].long(), torch.arange(inputs) // (inputs // groups)):
        raise UserError(f"{where} has its inputs in another order than their groups (act-order): {REMEDY}")
    if (zeros != (SYMMETRIC_V1 if layout == FORMAT_V1 else SYMMETRIC_V2)).any():
        raise UserError(f"{where} has zero points of its own, it is not symmetric: {REMEDY}")
    if not stored_scales.isfinite().all():
        raise UserError(f"{where} holds scales that are not finite: the file is damaged, fetch or make it again")
    codes.copy_(words.t().contiguous().view(torch.uint8))
    scales.copy_(stored_scales.t())
    if (scales != stored_scales.t()).any():
        raise UserError(f"{where} has scales of type {stored_scales.dtype} that float16 cannot hold: {REMEDY}")
