"""An expert put together on the GPU from its INT4 codes and the record that came over the link (`engine.records`).

A program restores one row: it reads the row's codes, knows from them how many bits of the stream each weight has, and a running
sum over the row says where they lie. What the codes do not reproduce is written over the rows afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter_lab.compress.residual import STREAM_BITS
from specter_lab.engine.records import Records

_PATCHES = 256  # exceptions of a program


@triton.jit(do_not_specialize=["stream_at"])  # nothing may be compiled while kernels wait for what is restored
def _restore(
    record, stream_at, gate, gate_scales, up, up_scales, down, down_scales, out, hidden, width, hidden_groups, width_groups,
    HIDDEN_GROUP: tl.constexpr, WIDTH_GROUP: tl.constexpr, BLOCK: tl.constexpr, BITS_0: tl.constexpr, BITS_1: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    is_down, is_up = row >= 2 * width, row >= width
    of_part = row - tl.where(is_down, 2 * width, tl.where(is_up, width, 0))
    inputs = tl.where(is_down, width, hidden)
    first = tl.where(
        is_down, 2 * width * hidden + of_part * width, row * hidden
    )  # an expert has fewer than 2^31 weights
    codes = tl.where(is_down, down, tl.where(is_up, up, gate)) + of_part * (inputs // 2)
    scales = tl.where(is_down, down_scales, tl.where(is_up, up_scales, gate_scales))
    scales += of_part * tl.where(is_down, width_groups, hidden_groups)
    i = tl.arange(0, BLOCK)
    good = i < inputs
    byte = tl.load(codes + i // 2, mask=good, other=0).to(tl.int32)
    q = ((byte >> (4 * (i % 2))) & 0xF) - 8
    magnitude = tl.abs(q)
    scale = tl.load(scales + tl.where(is_down, i // WIDTH_GROUP, i // HIDDEN_GROUP), mask=good, other=1.0).to(
        tl.float32
    )
    edge = tl.where(q == 0, 0.5, magnitude.to(tl.float32) - 0.5) * scale
    nearest = (edge.to(tl.int32, bitcast=True) >> 23) & 0xFF
    count = tl.where(good, tl.where(magnitude == 0, BITS_0, tl.where(magnitude == 1, BITS_1, 0)), 0)
    place = tl.cumsum(count, 0) - count
    starts = (record + 3 * hidden * width).to(tl.pointer_type(tl.int32))
    at = record + stream_at + tl.load(starts + row) + (place >> 3)
    asked = count > 0
    pair = tl.load(at, mask=asked, other=0).to(tl.int32) | (tl.load(at + 1, mask=asked, other=0).to(tl.int32) << 8)
    value = (pair >> (place & 7)) & ((1 << count) - 1)
    bits = tl.load(record + first + i, mask=good, other=0).to(tl.int32)
    top = bits >> 7
    away = tl.where(q == 0, -value, tl.where(magnitude == 1, value * 2, 0) | top)
    sign = tl.where(q == 0, top, (q < 0).to(tl.int32))
    pattern = (sign << 15) | (((nearest + away) & 0xFF) << 7) | (bits & 0x7F)
    tl.store(out + first + i, pattern.to(tl.int16), mask=good)


@triton.jit(do_not_specialize=["places_at", "count"])
def _patch(record, places_at, count, out, BLOCK: tl.constexpr):
    places = (record + places_at).to(tl.pointer_type(tl.int32))
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    patterns = (places + count).to(tl.pointer_type(tl.int16))
    pattern = tl.load(patterns + i, mask=i < count, other=0)
    tl.store(out + tl.load(places + i, mask=i < count, other=0), pattern, mask=i < count)


def restore_expert(room: Tensor, records: Records, layer: int, expert: int, place: Tensor) -> None:
    """Fill `place` with the weights that were encoded, bit for bit.

    Args:
        room: [B] uint8 on the device, the expert's record; 4-byte aligned.
        place: [N] bfloat16 on the device.
    """
    bank, hidden, width, exceptions = (
        records.banks[layer],
        records.hidden,
        records.width,
        int(records.exceptions[layer, expert]),
    )
    places_at = records.numel + 4 * records.rows
    gate, up, down = ((part.packed[expert], part.scales[expert]) for part in (bank.gate, bank.up, bank.down))
    groups, out, block = (
        (gate[1].shape[1], down[1].shape[1]),
        place.view(torch.int16),
        triton.next_power_of_2(max(hidden, width)),
    )
    _restore[(records.rows,)](
        room, places_at + 6 * exceptions, *gate, *up, *down, out, hidden, width, *groups,
        HIDDEN_GROUP=hidden // groups[0], WIDTH_GROUP=width // groups[1],
        BLOCK=block, BITS_0=STREAM_BITS[0], BITS_1=STREAM_BITS[1], num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    _patch[(max(1, triton.cdiv(exceptions, _PATCHES)),)](room, places_at, exceptions, out, BLOCK=_PATCHES)
