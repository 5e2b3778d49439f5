"""BF16 weights put together on the GPU from their INT4 codes and what came over the link (`compress.residual`).

A program restores one row: it reads the row's codes, knows from them how many bits of the stream each weight has, and a running
sum over the row says where they lie.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter_lab.compress.residual import STREAM_BITS, Residual


@triton.jit
def _restore(
    low, packed, scales, stream, starts, out, width, groups,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BITS_0: tl.constexpr, BITS_1: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    good = i < width
    byte = tl.load(packed + row * (width // 2) + i // 2, mask=good, other=0).to(tl.int32)
    q = ((byte >> (4 * (i % 2))) & 0xF) - 8
    magnitude = tl.abs(q)
    scale = tl.load(scales + row * groups + i // GROUP, mask=good, other=1.0).to(tl.float32)
    edge = tl.where(q == 0, 0.5, magnitude.to(tl.float32) - 0.5) * scale
    nearest = (edge.to(tl.int32, bitcast=True) >> 23) & 0xFF
    count = tl.where(good, tl.where(magnitude == 0, BITS_0, tl.where(magnitude == 1, BITS_1, 0)), 0)
    place = tl.cumsum(count, 0) - count
    at = stream + tl.load(starts + row).to(tl.int64) + (place >> 3)
    asked = count > 0
    pair = tl.load(at, mask=asked, other=0).to(tl.int32) | (tl.load(at + 1, mask=asked, other=0).to(tl.int32) << 8)
    value = (pair >> (place & 7)) & ((1 << count) - 1)
    bits = tl.load(low + row * width + i, mask=good, other=0).to(tl.int32)
    top = bits >> 7
    away = tl.where(q == 0, -value, tl.where(magnitude == 1, value * 2, 0) | top)
    sign = tl.where(q == 0, top, (q < 0).to(tl.int32))
    pattern = (sign << 15) | (((nearest + away) & 0xFF) << 7) | (bits & 0x7F)
    tl.store(out + row * width + i, pattern.to(tl.int16), mask=good)


def restore(residual: Residual, packed: Tensor, scales: Tensor) -> Tensor:
    """The weights [R, n] bfloat16 that were encoded, bit for bit.

    Args:
        residual: on the device of `packed`.
        packed: [R, n / 2] uint8, codes in the INT4 layout.
        scales: [R, G] float16.
    """
    rows, width = residual.low.shape
    out = torch.empty(rows, width, dtype=torch.int16, device=packed.device)
    _restore[(rows,)](
        residual.low, packed, scales, residual.stream, residual.starts, out, width, scales.shape[1],
        GROUP=width // scales.shape[1], WIDTH=triton.next_power_of_2(width), BITS_0=STREAM_BITS[0], BITS_1=STREAM_BITS[1],
        num_warps=4,
    )  # fmt: skip
    out.view(-1).index_copy_(0, residual.places, residual.patterns)
    return out.view(torch.bfloat16)
