"""AWQ checkpoints: the packed format, and what belongs to the routed experts in them.

AWQ (arXiv 2306.00978) multiplies the inputs of a linear layer by scales s before it rounds the weights, and divides
whatever produced those inputs by s. For gate and up that is the norm in front of the MoE block, for down the rows of
up. The norm, however, also feeds the router and the shared experts, and neither gptqmodel nor autoawq multiplies these
by s: such a checkpoint routes differently before a single rounding error. So only its experts are taken, with the
scales moved out of the norm and back into gate and up; down and up belong to the same expert and need nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from specter_lab.errors import UserError
from specter_lab.models.experts import ExpertBank

BITS = 4
CODES_PER_WORD = 32 // BITS
NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word, lowest first, holds code NIBBLE_ORDER[i] of its eight
_NORM = re.compile(r"model\.layers\.(\d+)\.post_attention_layernorm\.(weight|bias)")
_ROUNDING = 2.0**-7  # twice the relative rounding error of BF16: a scaled weight and a scaled bias, rounded apart


def unpack_nibbles(words: Tensor) -> Tensor:
    """[R, C / 8] int32 -> [R, C] integers 0 .. 15, in the order of AWQ's "gemm" format."""
    shifts = torch.empty(CODES_PER_WORD, dtype=torch.int32)
    shifts[list(NIBBLE_ORDER)] = torch.arange(CODES_PER_WORD, dtype=torch.int32) * BITS
    return (words[:, :, None] >> shifts & 15).flatten(1)


def dequantize_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, bits: int = BITS) -> Tensor:
    """Effective float32 weights of one linear layer in AWQ's "gemm" format.

    Args:
        qweight: [in, out / 8] int32.
        qzeros: [G, out / 8] int32, one zero point per group of in / G inputs.
        scales: [G, out] float16 or bfloat16.
        bits: 4; the format has no other.

    Returns:
        [out, in]: (code - zero) * scale.

    Raises:
        UserError: `bits` is not 4, or the shapes do not belong together.
    """
    inputs, groups = qweight.shape[0], scales.shape[0]
    if bits != BITS:
        raise UserError(f"AWQ checkpoints have {BITS} bits, this one says {bits}: quantise the model anew")
    if qzeros.shape != (groups, qweight.shape[1]) or scales.shape[1] != qweight.shape[1] * 8 or inputs % groups:
        shapes = f"{tuple(qweight.shape)}, {tuple(qzeros.shape)}, {tuple(scales.shape)}"
        raise UserError(f"AWQ tensors of shapes {shapes} do not make one layer: the file is damaged, fetch it again")
    codes = unpack_nibbles(qweight).unflatten(0, (groups, -1))  # [G, in / G, out]
    zeros = unpack_nibbles(qzeros)[:, None]  # [G, 1, out]
    return ((codes - zeros) * scales.float()[:, None]).flatten(0, 1).t().contiguous()


def read_norms(folder: Path) -> dict[int, dict[str, Tensor]]:
    """Decoder layer -> "weight" [H] (and "bias" [H], if any) of the norm in front of its feed-forward block."""
    norms: dict[int, dict[str, Tensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for match in filter(None, map(_NORM.fullmatch, file.keys())):
                norms.setdefault(int(match[1]), {})[match[2]] = file.get_tensor(match[0]).float()
    return norms


def folded_scales(source: Path, packed: Path) -> dict[int, Tensor]:
    """Decoder layer -> scales s [H] that AWQ divided the norm by; ones where it left the norm alone.

    Args:
        source: the checkpoint that was quantised.
        packed: the AWQ checkpoint made from it.

    Raises:
        UserError: the two do not have the same layers, or differ by more than scales.
    """
    original, scaled = read_norms(source), read_norms(packed)
    if not original or original.keys() != scaled.keys():
        raise UserError(f"{packed} and {source} do not have the same layers: give the checkpoint that was quantised")
    scales = {}
    for layer, norm in original.items():
        s = _ratio(norm, scaled[layer])
        if s is None:
            raise UserError(f"layer {layer}: the norm in {packed} is not that of {source} divided by scales: give the "
                            f"checkpoint that was quantised")  # fmt: skip
        scales[layer] = s
    return scales


def _ratio(norm: dict[str, Tensor], scaled: dict[str, Tensor]) -> Tensor | None:
    """Positive s [H] with weight and bias of `norm` s times those of `scaled`; None if there is no such s."""
    before, after = norm["weight"], scaled["weight"]
    if before.shape != after.shape or norm.keys() != scaled.keys():
        return None
    s = torch.where(after == 0, 1.0, before / after)  # a channel that is always 0 needs no scale
    fits = "bias" not in norm or torch.allclose(scaled["bias"] * s, norm["bias"], rtol=_ROUNDING, atol=1e-6)
    return s if fits and (s > 0).all() else None


def undo_folding(banks: Sequence[ExpertBank], scales: dict[int, Tensor]) -> list[ExpertBank]:
    """Experts of an AWQ checkpoint as weights that work behind the *original* norm.

    Args:
        banks: dequantised experts as they stand in the checkpoint.
        scales: what `folded_scales` found.

    Returns:
        Banks whose every expert computes from the original norm's output what `banks` compute from the scaled one's.
    """
    return [
        replace(bank, gate=bank.gate / scales[bank.layer], up=bank.up / scales[bank.layer])  # [E, I, H] / [H]
        for bank in banks
    ]
