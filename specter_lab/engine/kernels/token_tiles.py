"""Tokens sorted by expert and cut into tiles of at most so many, in one launch: the columns of the grouped GEMM's grid.

How many tiles an expert needs is known on the device only. The grid holds the most there can be, min(E, T) + T // tile;
tiles in use come first, the others have a count of zero and stop at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specter_lab.engine.kernels.launch import overlaps_launches

_MOST_AT_ONCE = 1024  # tokens that a program looks at in one step
_TILES = 32  # written in one step


def most_tiles(experts: int, tokens: int, tile: int) -> int:
    """Tiles that `tokens` of so many experts can need."""
    return min(experts, tokens) + tokens // tile


@triton.jit
def _token_tiles(
    experts, expert_out, start_out, count_out, order, tokens, num_experts, items,
    TILE: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One expert per program: every program counts all tokens, so none waits for another."""
    if PDL:
        gdc_launch_dependents()  # before the wait: the next kernel asks for its weights meanwhile
        gdc_wait()
    mine = tl.program_id(0)
    ids = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        expert = tl.load(experts + token, mask=token < tokens, other=-1)
        counts += tl.sum((expert[:, None] == ids[None, :]).to(tl.int32), axis=0)
    counts = tl.where(ids < num_experts, counts, 0)
    tiles = (counts + TILE - 1) // TILE
    count = tl.sum(tl.where(ids == mine, counts, 0), axis=0)
    start = tl.sum(tl.where(ids < mine, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(ids < mine, tiles, 0), axis=0)
    place = start
    for first in range(0, tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        chosen = (tl.load(experts + token, mask=token < tokens, other=-1) == mine).to(tl.int32)
        tl.store(order + place + tl.cumsum(chosen, 0) - 1, token, mask=chosen > 0)
        place += tl.sum(chosen, axis=0)
    for first in range(0, count, TILE * TILES):
        done = first + tl.arange(0, TILES) * TILE
        item = first_tile + done // TILE
        tl.store(expert_out + item, tl.zeros([TILES], tl.int32) + mine, mask=done < count)
        tl.store(start_out + item, start + done, mask=done < count)
        tl.store(count_out + item, tl.minimum(count - done, TILE), mask=done < count)
    if mine == 0:
        for first in range(tl.sum(tiles, axis=0), items, TILES):
            item = first + tl.arange(0, TILES)
            tl.store(count_out + item, tl.zeros([TILES], tl.int32), mask=item < items)


def token_tiles(experts: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort tokens by expert, stably, and cut every expert's into tiles, on the device.

    Args:
        experts: [T] integers, contiguous; a value outside 0 .. E-1 is left out.
        num_experts: E.
        tile: tokens of a tile, a power of two.

    Returns:
        expert, start, count [most_tiles] int32 of each tile, the first two not written where count is 0; and order [T]
        int32: tile i is tokens order[start[i] : start[i] + count[i]].
    """
    tokens, pdl = len(experts), overlaps_launches(experts.device)
    items = most_tiles(num_experts, tokens, tile)
    expert, start, count, order = (
        torch.empty(size, dtype=torch.int32, device=experts.device) for size in (items, items, items, tokens)
    )
    _token_tiles[(num_experts,)](
        experts, expert, start, count, order, tokens, num_experts, items, TILE=tile,
        EXPERTS=max(16, triton.next_power_of_2(num_experts)), TILES=_TILES, PDL=pdl, num_warps=8, launch_pdl=pdl,
        TOKENS=min(_MOST_AT_ONCE, max(32, triton.next_power_of_2(tokens))),
    )  # fmt: skip
    return expert, start, count, order
