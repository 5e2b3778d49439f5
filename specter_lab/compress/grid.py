"""The integer grid: one definition of scale and rounding, used by round-to-nearest, GPTQ and the INT4 layout alike.

Symmetric, b bits, one FP16 scale per (row, group): codes -2^(b-1) .. 2^(b-1)-1 times the scale. The scale maps
[-absmax, absmax] onto the whole range, scale = 2 absmax / (2^b - 1), as GPTQ does (arXiv 2210.17323, section 4); for
4 bits that is absmax / 7.5, so the largest weight of a group lands half a step outside the codes on one side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specter_lab.errors import UserError
from specter_lab.models.experts import ExpertBank

BITS = (2, 3, 4, 8)
GROUP = 128
_SMALLEST_SCALE = 2.0**-24  # smallest positive FP16 number: an all-zero group divides by it, not by zero


@dataclass(frozen=True)
class Codes:
    """One projection of all experts of a layer, on the grid."""

    codes: Tensor  # [E, out, in] int8
    scales: Tensor  # [E, out, G] float16; G = in / group
    bits: int

    @property
    def group(self) -> int:
        return self.codes.shape[-1] // self.scales.shape[-1]


@dataclass(frozen=True)
class CodedBank:
    """All routed experts of one MoE layer, on the grid."""

    layer: int  # decoder layer
    gate: Codes  # [E, I, H]
    up: Codes  # [E, I, H]
    down: Codes  # [E, H, I]


def group_of(in_features: int, group: int = GROUP) -> int:
    """Group size used for rows of `in_features`: a row shorter than the group is one group.

    Raises:
        UserError: the row is longer and not a whole number of groups.
    """
    if in_features <= group:
        return in_features
    if in_features % group:
        raise UserError(f"rows of {in_features} weights are not a whole number of groups of {group}: choose a group "
                        f"size that divides {in_features}")  # fmt: skip
    return group


def scale_for(absmax: Tensor, bits: int) -> Tensor:
    """FP16 scales for groups whose largest magnitude is `absmax` (any shape)."""
    return (absmax.float() * 2 / (2**bits - 1)).clamp_min(_SMALLEST_SCALE).half()


def round_to_codes(weights: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Nearest codes (as float32, ties to even) of `weights`; `scales` broadcasts against them."""
    return torch.round(weights / scales.float()).clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def round_to_nearest(weights: Tensor, bits: int, group: int = GROUP) -> Codes:
    """Put `weights` [E, out, in] on the grid, each weight by itself."""
    size = group_of(weights.shape[-1], group)
    grouped = weights.float().unflatten(-1, (-1, size))  # [E, out, G, group]
    scales = scale_for(grouped.abs().amax(dim=-1), bits)  # [E, out, G]
    codes = round_to_codes(grouped, scales.unsqueeze(-1), bits)
    return Codes(codes.flatten(-2).to(torch.int8), scales, bits)


def dequantize_bank(coded: CodedBank) -> ExpertBank:
    """The bank as its codes read it back, float32."""
    return ExpertBank(coded.layer, dequantize(coded.gate), dequantize(coded.up), dequantize(coded.down))


def dequantize(coded: Codes) -> Tensor:
    """Effective float32 weights [E, out, in]; exact, since an integer code times an FP16 scale fits float32."""
    grouped = coded.codes.float().unflatten(-1, (-1, coded.group))  # [E, out, G, group]
    return (grouped * coded.scales.float().unsqueeze(-1)).flatten(-2)
