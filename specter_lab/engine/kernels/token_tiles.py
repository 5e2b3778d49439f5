"""From experts with any number of tokens to tiles of at most so many: the columns of the grouped GEMM's grid.

How many tiles an expert needs is known on the device only. The grid holds the most there can be, S + T // tile; tiles
in use come first, the others have a count of zero and stop at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def most_tiles(slots: int, tokens: int, tile: int) -> int:
    """Tiles that `tokens` in `slots` experts can need."""
    return min(slots, tokens) + tokens // tile


@triton.jit
def _tiles(
    expert_of, start_of, count_of, expert_out, start_out, count_out, slots, items,
    TILE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    slot = tl.arange(0, BLOCK_S)
    count = tl.load(count_of + slot, mask=slot < slots, other=0)
    tiles = (count + TILE - 1) // TILE  # [S]
    before = tl.cumsum(tiles, 0) - tiles
    item = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    number = item[:, None] - before[None, :]  # [I, S] of the item among the slot's tiles
    mine = (number >= 0) & (number < tiles[None, :])  # true for one slot, or none
    found = tl.sum(mine.to(tl.int32), 1) > 0
    which = tl.sum(tl.where(mine, slot[None, :], 0), 1)  # [I]
    first = tl.sum(tl.where(mine, number, 0), 1) * TILE
    left = tl.sum(tl.where(mine, count[None, :], 0), 1) - first
    good = item < items
    tl.store(expert_out + item, tl.load(expert_of + which, mask=good & found, other=0).to(tl.int32), mask=good)
    tl.store(start_out + item, tl.load(start_of + which, mask=good & found, other=0) + first, mask=good)
    tl.store(count_out + item, tl.where(found, tl.minimum(left, TILE), 0), mask=good)


def token_tiles(expert: Tensor, start: Tensor, count: Tensor, tokens: int, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut slots into tiles, on the device.

    Args:
        expert: [S] of each slot; start, count: [S] int32, its tokens in the sorted order, which need not be read where
            count is 0.
        tokens: T, an upper bound of the sum of counts.
        tile: tokens of a tile, a power of two.

    Returns:
        expert, start, count [most_tiles] int32 of each tile.
    """
    slots, items = len(count), most_tiles(len(count), tokens, tile)
    out = tuple(torch.empty(items, dtype=torch.int32, device=count.device) for _ in range(3))
    block = 32
    _tiles[(triton.cdiv(items, block),)](
        expert,
        start,
        count,
        *out,
        slots,
        items,
        TILE=tile,
        BLOCK_S=max(16, triton.next_power_of_2(slots)),
        BLOCK_I=block,
    )
    return out
