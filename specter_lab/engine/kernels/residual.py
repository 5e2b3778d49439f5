"""Experts put together on the GPU from their INT4 codes and the records that came over the link (`engine.records`).

A program restores one row of one expert: it reads the row's codes, knows from them how many bits of the stream each weight has, and
a running sum over the row says where they lie. What the codes do not reproduce is written over the row at the end. One launch
restores all the experts of a room. Which they are it reads on the device, so that it can be captured once and replayed: the host
has to launch it while others wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter_lab.compress.residual import STREAM_BITS
from specter_lab.engine.records import Records

EXPERTS = 4  # of one launch at most: the first of them waits for the last one's bytes
_EXCEPTIONS = 32  # written at a time


@triton.jit
def _restore(
    room, room_bytes, codes_of, slots, what, hidden, width,
    HIDDEN_GROUP: tl.constexpr, WIDTH_GROUP: tl.constexpr, BLOCK: tl.constexpr, BITS_0: tl.constexpr, BITS_1: tl.constexpr,
    EXCEPTIONS: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    row, place_in_room = tl.program_id(0), tl.program_id(1)
    number, slot = tl.load(what + 2 * place_in_room).to(tl.int64), tl.load(what + 2 * place_in_room + 1).to(tl.int64)
    if slot < 0:
        return
    rows, numel = 2 * width + hidden, 3 * hidden * width  # an expert has fewer than 2^31 weights
    record = room + place_in_room.to(tl.int64) * room_bytes
    out = slots + slot * numel
    part = tl.where(row >= 2 * width, 2, tl.where(row >= width, 1, 0))
    of_part = row - part * width
    inputs = tl.where(part == 2, width, hidden)
    first = tl.where(part == 2, 2 * width * hidden + of_part * width, row * hidden)
    address = codes_of + number * 6 + 2 * part
    packed = tl.load(address).to(tl.pointer_type(tl.uint8)) + of_part * (inputs // 2)
    group = tl.where(part == 2, WIDTH_GROUP, HIDDEN_GROUP)
    scales = tl.load(address + 1).to(tl.pointer_type(tl.float16)) + of_part * (inputs // group)
    half = tl.arange(0, BLOCK // 2)
    byte = tl.load(packed + half, mask=half < inputs // 2, other=0).to(tl.int32)
    q = tl.interleave(byte & 0xF, byte >> 4) - 8  # [BLOCK]
    i = tl.arange(0, BLOCK)
    good = i < inputs
    magnitude = tl.abs(q)
    scale = tl.load(scales + i // group, mask=good, other=1.0).to(tl.float32)
    edge = tl.where(q == 0, REACH, magnitude.to(tl.float32) - REACH) * scale
    nearest = (edge.to(tl.int32, bitcast=True) >> 23) & 0xFF
    count = tl.where(good, tl.where(magnitude == 0, BITS_0, tl.where(magnitude == 1, BITS_1, 0)), 0)
    place = tl.cumsum(count, 0) - count
    starts = (record + numel).to(tl.pointer_type(tl.int32))
    before = starts + rows
    places = before + rows + 1
    patterns = (places + tl.load(before + rows)).to(tl.pointer_type(tl.int16))
    stream = (patterns + tl.load(before + rows)).to(tl.pointer_type(tl.uint8))
    at = stream + tl.load(starts + row) + (place >> 3)
    asked = count > 0
    pair = tl.load(at, mask=asked, other=0).to(tl.int32) | (tl.load(at + 1, mask=asked, other=0).to(tl.int32) << 8)
    value = (pair >> (place & 7)) & ((1 << count) - 1)
    bits = tl.load(record + first + i, mask=good, other=0).to(tl.int32)
    top = bits >> 7
    away = tl.where(q == 0, -value, tl.where(magnitude == 1, value * 2, 0) | top)
    sign = tl.where(q == 0, top, (q < 0).to(tl.int32))
    pattern = (sign << 15) | (((nearest + away) & 0xFF) << 7) | (bits & 0x7F)
    tl.store(out + first + i, pattern.to(tl.int16), mask=good)
    exception, last = tl.load(before + row), tl.load(before + row + 1)
    if exception < last:
        tl.debug_barrier()  # the row is written
    while exception < last:
        x = exception + tl.arange(0, EXCEPTIONS)
        tl.store(
            out + tl.load(places + x, mask=x < last, other=0),
            tl.load(patterns + x, mask=x < last, other=0),
            mask=x < last,
        )
        exception += EXCEPTIONS


def restore_experts(room: Tensor, what: Tensor, records: Records, device: Tensor) -> None:
    """Fill slots with the weights that were encoded, bit for bit.

    Args:
        room: [EXPERTS, B] uint8 on the device, a record in each row; B a multiple of 4, rows aligned to it.
        what: [EXPERTS, 2] int32 on the device: number of the expert, layer * E + expert, and the slot that is to be filled, or less than 0.
        device: [S, N] bfloat16, all slots.
    """
    gate, down = records.banks[0].gate, records.banks[0].down
    block = triton.next_power_of_2(max(records.hidden, records.width))
    groups = (records.hidden // gate.scales.shape[2], records.width // down.scales.shape[2])
    _restore[(records.rows, EXPERTS)](
        room, room.shape[1], records.codes, device.view(torch.int16), what, records.hidden, records.width,
        HIDDEN_GROUP=groups[0], WIDTH_GROUP=groups[1], BLOCK=block, BITS_0=STREAM_BITS[0], BITS_1=STREAM_BITS[1],
        EXCEPTIONS=_EXCEPTIONS, REACH=records.reach, num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
