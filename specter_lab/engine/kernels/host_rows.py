"""Rows that the host has computed, read by a kernel from pinned memory.

A copy would queue on the copy engine behind experts on their way; a kernel has the link at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _take(rows, pairs, parts, width, BLOCK: tl.constexpr):
    pair = tl.load(pairs + tl.program_id(0)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + pair * width + column, mask=column < width)
    tl.store(parts + pair * width + column, row, mask=column < width)


def take_rows(rows: Tensor, pairs: Tensor, parts: Tensor) -> None:
    """parts[pairs] = rows[pairs].

    Args:
        rows: [P, H] float32, pinned on the host; like `pairs` not to be changed before the current stream has come so far.
        pairs: [n] int64, pinned on the host.
        parts: [P, H] float32 on the device.
    """
    width = rows.shape[1]
    _take[(len(pairs), triton.cdiv(width, _BLOCK))](rows, pairs, parts, width, BLOCK=_BLOCK, num_warps=4)
