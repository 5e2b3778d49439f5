"""Rows that the host has computed, read by a kernel from pinned memory.

A copy would queue on the copy engine behind experts on their way; a kernel has the link at once. It belongs to the captured pass, so
the host launches nothing for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _take(rows, done, parts, width, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mine = (column < width) & (tl.load(done + pair) != 0)
    tl.store(parts + pair * width + column, tl.load(rows + pair * width + column, mask=mine), mask=mine)


def take_rows(rows: Tensor, done: Tensor, parts: Tensor) -> None:
    """Where `done`, rows of `parts` become those of `rows`.

    Args:
        rows: [P, H] float32, pinned on the host; like `done` not to be changed before the current stream has come so far.
        done: [P] uint8, pinned on the host.
        parts: [T, k, H] float32 on the device, T * k = P.
    """
    width = rows.shape[1]
    _take[(len(done), triton.cdiv(width, _BLOCK))](rows, done, parts, width, BLOCK=_BLOCK, num_warps=4)
