"""The INT4 layout of the project: what the draft keeps on the GPU and what the kernels read.

Symmetric, group 128 (Specter, section SIC): codes -8..7, one FP16 scale per (row, group). A byte holds two
neighbouring inputs of one row, the even one in the low nibble, each stored as code + 8, so that a kernel can use
the nibble as an unsigned number and subtract 8 once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from specter_lab.compress import grid, rtn
from specter_lab.compress.grid import CodedBank, Codes
from specter_lab.models.experts import ExpertBank

INT4_BITS = 4
OFFSET = 8  # stored nibble = code + OFFSET


@dataclass(frozen=True)
class Int4Weights:
    """One projection of all experts of a layer."""

    packed: Tensor  # [E, out, in / 2] uint8
    scales: Tensor  # [E, out, G] float16


@dataclass(frozen=True)
class Int4Bank:
    """All routed experts of one MoE layer in the INT4 layout."""

    layer: int  # decoder layer
    gate: Int4Weights  # [E, I, H / 2]
    up: Int4Weights  # [E, I, H / 2]
    down: Int4Weights  # [E, H, I / 2]


def pack(codes: Tensor) -> Tensor:
    """[..., in] int8 codes -8..7 -> [..., in / 2] uint8."""
    nibbles = (codes + OFFSET).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """[..., in / 2] uint8 -> [..., in] int8 codes -8..7; the inverse of `pack`."""
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)  # [..., in]
    return nibbles.to(torch.int8) - OFFSET


def pack_bank(coded: CodedBank) -> Int4Bank:
    """Store 4-bit codes (from round-to-nearest or GPTQ) in the INT4 layout.

    Raises:
        ValueError: the codes have another number of bits.
    """
    if coded.gate.bits != INT4_BITS:
        raise ValueError(f"the INT4 layout holds 4-bit codes, these have {coded.gate.bits} bits")
    gate, up, down = (Int4Weights(pack(c.codes), c.scales) for c in (coded.gate, coded.up, coded.down))
    return Int4Bank(coded.layer, gate, up, down)


def unpack_bank(packed: Int4Bank) -> CodedBank:
    """The codes of a bank in the INT4 layout; the inverse of `pack_bank`."""
    gate, up, down = (Codes(unpack(w.packed), w.scales, INT4_BITS) for w in (packed.gate, packed.up, packed.down))
    return CodedBank(packed.layer, gate, up, down)


def quantize_bank(bank: ExpertBank) -> Int4Bank:
    """Round the experts of one layer to nearest, straight into the INT4 layout.

    Raises:
        TypeError: `bank` is not an `ExpertBank`.
    """
    return pack_bank(rtn.quantize_bank(bank, INT4_BITS))


def dequantize_bank(packed: Int4Bank) -> ExpertBank:
    """Effective float32 weights of a bank in the INT4 layout."""
    return grid.dequantize_bank(unpack_bank(packed))


@cache
def int4_expert_bytes(hidden_size: int, expert_width: int) -> int:
    """Bytes of one routed expert in the INT4 layout, codes and scales, counted on tensors without memory."""
    with torch.device("meta"):
        gate, up = torch.empty(2, 1, expert_width, hidden_size)  # [1, I, H] each
        down = torch.empty(1, hidden_size, expert_width)
    packed = quantize_bank(ExpertBank(0, gate, up, down))
    return sum(part.packed.nbytes + part.scales.nbytes for part in (packed.gate, packed.up, packed.down))
