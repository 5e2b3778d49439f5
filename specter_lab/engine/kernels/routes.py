"""From routing to launches: tokens sorted by expert before the expert kernels, the sum over experts after them.

A pair is one choice of one token, number token * k + choice; P = T * k of them. A slot is one column of an expert
kernel's grid: the experts in use fill the first slots, the others find a count of zero and stop at once. Both kernels
have fixed shapes and read nothing on the host, so a CUDA graph can hold them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specter_lab.engine.kernels.launch import MAX_TOKENS, overlaps_launches

MAX_PAIRS = 512
_COMBINE_BLOCK = 512


@dataclass(frozen=True)
class Routes:
    """Who computes what, on the device. One token needs no sorting: its choices are the slots (`direct`)."""

    expert: Tensor  # [S] expert of each slot
    start: Tensor  # [S] int32, its first pair in `order`
    count: Tensor  # [S] int32, its pairs; 0: nothing to do
    order: Tensor  # [P] int32, pairs sorted by slot
    tokens: int
    top_k: int
    num_experts: int
    direct: bool

    @property
    def slots(self) -> int:
        return self.expert.shape[0]


@triton.jit
def _far_first(addresses, expert, known, num_experts, slab_start, slab_stop):
    """Sorting key of experts: those outside the slab come first."""
    address = tl.load(addresses + expert, mask=known, other=0)
    near = (address >= slab_start) & (address < slab_stop)
    return expert + near.to(tl.int32) * num_experts


@triton.jit
def _keys(indices, addresses, pair, pairs, num_experts, slab_start, slab_stop, FAR_FIRST: tl.constexpr):
    """Expert of each pair, -1 where there is nothing to compute, and its sorting key."""
    expert = tl.load(indices + pair, mask=pair < pairs, other=-1).to(tl.int32)
    expert = tl.where((expert >= 0) & (expert < num_experts), expert, -1)
    key = expert
    if FAR_FIRST:
        key = _far_first(addresses, expert, expert >= 0, num_experts, slab_start, slab_stop)
    return expert, key


@triton.jit
def _routes(
    indices, addresses, expert_out, start_out, count_out, order_out,
    pairs, num_experts, slots, slab_start, slab_stop,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, FAR_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.arange(0, BLOCK_P)
    ids = tl.arange(0, BLOCK_E)
    chosen, key = _keys(indices, addresses, pair, pairs, num_experts, slab_start, slab_stop, FAR_FIRST)  # [P]
    count = tl.zeros([BLOCK_E], tl.int32)
    rank = tl.zeros([BLOCK_P], tl.int32)  # pairs that come before this one
    for first in range(0, pairs, CHUNK):
        other = first + tl.arange(0, CHUNK)
        expert, other_key = _keys(indices, addresses, other, pairs, num_experts, slab_start, slab_stop, FAR_FIRST)
        count += tl.sum((expert[:, None] == ids[None, :]).to(tl.int32), axis=0)
        before = (other_key[:, None] < key[None, :]) | (
            (other_key[:, None] == key[None, :]) & (other[:, None] < pair[None, :])
        )
        rank += tl.sum((before & (expert >= 0)[:, None]).to(tl.int32), axis=0)
    tl.store(order_out + rank, pair, mask=chosen >= 0)
    active = (count > 0).to(tl.int32)
    id_key = ids
    if FAR_FIRST:
        id_key = _far_first(addresses, ids, ids < num_experts, num_experts, slab_start, slab_stop)
    before = (id_key[:, None] < id_key[None, :]).to(tl.int32)  # [E, E], expert of the row before that of the column
    slot = tl.sum(before * active[:, None], axis=0)  # [E]
    tl.store(expert_out + slot, ids, mask=active > 0)
    tl.store(start_out + slot, tl.sum(before * count[:, None], axis=0), mask=active > 0)
    tl.store(count_out + slot, count, mask=active > 0)
    idle = (ids >= tl.sum(active, axis=0)) & (ids < slots)
    tl.store(count_out + ids, tl.zeros([BLOCK_E], tl.int32), mask=idle)


def route(
    indices: Tensor, num_experts: int, addresses: Tensor | None = None, slab: tuple[int, int] | None = None
) -> Routes:
    """Sort the pairs of `indices` by expert, on the device.

    Args:
        indices: [T, k] integers on a CUDA device; a value outside 0 .. E-1 is a choice that is not computed.
        num_experts: E.
        addresses: [E] int64 address table; with `slab`, experts outside the slab come first, so that reading them over
            PCIe starts first.
        slab: first and one-past-last address of the device slab.

    Raises:
        ValueError: more than 64 tokens or 512 pairs in one call.
    """
    tokens, top_k = indices.shape
    pairs = tokens * top_k
    if tokens > MAX_TOKENS or pairs > MAX_PAIRS:
        raise ValueError(f"{tokens} tokens of {top_k} choices in one call, the limits are {MAX_TOKENS} and {MAX_PAIRS}")
    if not indices.is_contiguous():
        raise ValueError("indices must be contiguous")
    flat = indices.flatten()
    if tokens <= 1:
        return Routes(flat, flat, flat, flat, tokens, top_k, num_experts, direct=True)
    slots = min(num_experts, pairs)
    expert, start, count, order = (
        torch.empty(size, dtype=torch.int32, device=indices.device) for size in (slots, slots, slots, pairs)
    )
    far_first = addresses is not None and slab is not None
    low, high = slab if far_first else (0, 0)
    pdl = overlaps_launches(indices.device)
    _routes[(1,)](
        flat, addresses if far_first else flat, expert, start, count, order, pairs, num_experts, slots, low, high,
        BLOCK_P=max(16, triton.next_power_of_2(pairs)), BLOCK_E=max(16, triton.next_power_of_2(num_experts)),
        CHUNK=32, FAR_FIRST=far_first, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return Routes(expert, start, count, order, tokens, top_k, num_experts, direct=False)


@triton.jit
def slot_work(expert_of, start_of, count_of, slot, num_experts, DIRECT: tl.constexpr):
    """Expert, first pair and number of pairs of a slot."""
    if DIRECT:
        expert = tl.load(expert_of + slot).to(tl.int64)
        count = ((expert >= 0) & (expert < num_experts)).to(tl.int32)
        start = slot
    else:
        count = tl.load(count_of + slot)
        start = tl.load(start_of + slot, mask=count > 0, other=0)
        expert = tl.load(expert_of + slot, mask=count > 0, other=0).to(tl.int64)
    return expert, start, count


@triton.jit
def _combine(
    parts, indices, out, hidden, num_experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(indices + pair)
        computed = (expert >= 0) & (expert < num_experts)
        total += tl.load(parts + pair.to(tl.int64) * hidden + column, mask=(column < hidden) & computed, other=0.0)
    tl.store(out + token.to(tl.int64) * hidden + column, total.to(out.dtype.element_ty), mask=column < hidden)


def combine(parts: Tensor, indices: Tensor, num_experts: int, out: Tensor) -> Tensor:
    """Sum the weighted outputs `parts` [P, H] float32 of every token's experts, in the order of its choices.

    Args:
        parts: [P, H]; rows of choices that are not computed are not read.
        indices: [T, k].
        num_experts: E.
        out: [T, H], written and returned.
    """
    tokens, top_k = indices.shape
    hidden = parts.shape[1]
    if tokens:
        grid = (tokens, triton.cdiv(hidden, _COMBINE_BLOCK))
        pdl = overlaps_launches(out.device)
        _combine[grid](
            parts, indices, out, hidden, num_experts, TOP_K=top_k, BLOCK=_COMBINE_BLOCK, PDL=pdl, launch_pdl=pdl
        )
    return out
