"""The target's routed experts in BF16, read through an address table.

Entry e of the table is where expert e lies now: in a slot of the device slab, or in pinned host memory, which the
kernel then reads over PCIe itself, each byte once. The addresses are read when the kernel runs, so a captured CUDA
graph follows every change of the table. One block holds gate and up [2I, H], then down [H, I], row after row.

A token's result does not depend on the other rows: rows of an expert are columns of a tensor-core tile, the reduction
runs over fixed steps of the input width in one order, and a token's experts are added in the order of its choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specter_lab.engine.kernels.launch import overlaps_launches
from specter_lab.engine.kernels.routes import Routes, combine, route, slot_work


@dataclass(frozen=True)
class GroupedTiles:
    """Shape of one program. `inputs` fixes the order of the sum and must be the same wherever results must be equal."""

    outputs: int  # weight rows; 64 keeps the compiler on one tensor instruction for any number of tokens
    inputs: int
    stages: int
    warps: int


GATE_UP = GroupedTiles(outputs=64, inputs=128, stages=3, warps=4)
DOWN = GroupedTiles(outputs=64, inputs=128, stages=4, warps=4)


@triton.jit
def _gate_up(
    x, addresses, act, expert_of, start_of, count_of, order, num_experts, hidden, width,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, DIRECT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, start, count = slot_work(expert_of, start_of, count_of, tl.program_id(1), num_experts, DIRECT)
    if count == 0:
        return
    base = tl.multiple_of(tl.load(addresses + expert).to(tl.pointer_type(tl.bfloat16)), 16)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    place = tl.arange(0, TOKENS)
    if DIRECT:
        token = place * 0
    else:
        token = tl.load(order + start + place, mask=place < count, other=0) // TOP_K
    gate_rows = base + row[:, None] * hidden + k[None, :]  # a block has fewer than 2^31 weights
    up_rows = gate_rows + width * hidden
    x_rows = x + token[:, None] * hidden + k[None, :]
    row_good = (row < width)[:, None]
    token_good = (place < count)[:, None]
    acc_gate = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS], tl.float32)
    for k0 in range(0, hidden, BLOCK_K):
        inside = (k0 + k < hidden)[None, :]
        gate = tl.load(gate_rows + k0, mask=row_good & inside, other=0.0, eviction_policy="evict_first")
        up = tl.load(up_rows + k0, mask=row_good & inside, other=0.0, eviction_policy="evict_first")
        inputs = tl.trans(tl.load(x_rows + k0, mask=token_good & inside, other=0.0))  # [BLOCK_K, TOKENS]
        acc_gate = tl.dot(gate, inputs, acc_gate)
        acc_up = tl.dot(up, inputs, acc_up)
    value = acc_gate / (1.0 + tl.exp(-acc_gate)) * acc_up
    target = act + (start + place)[None, :] * width + row[:, None]
    tl.store(target, value.to(tl.bfloat16), mask=row_good & (place < count)[None, :])


@triton.jit
def _down(
    act, addresses, weights, parts, expert_of, start_of, count_of, order, num_experts, hidden, width,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, DIRECT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, start, count = slot_work(expert_of, start_of, count_of, tl.program_id(1), num_experts, DIRECT)
    if count == 0:
        return
    base = tl.multiple_of(tl.load(addresses + expert).to(tl.pointer_type(tl.bfloat16)), 16)
    base += 2 * width * hidden
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    place = tl.arange(0, TOKENS)
    down_rows = base + row[:, None] * width + k[None, :]
    act_rows = act + (start + place)[:, None] * width + k[None, :]
    row_good = (row < hidden)[:, None]
    token_good = (place < count)[:, None]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for k0 in range(0, width, BLOCK_K):
        inside = (k0 + k < width)[None, :]
        down = tl.load(down_rows + k0, mask=row_good & inside, other=0.0, eviction_policy="evict_first")
        inputs = tl.trans(tl.load(act_rows + k0, mask=token_good & inside, other=0.0))  # [BLOCK_K, TOKENS]
        acc = tl.dot(down, inputs, acc)
    if DIRECT:
        pair = start + place
    else:
        pair = tl.load(order + start + place, mask=place < count, other=0)
    weight = tl.load(weights + pair, mask=place < count, other=0.0).to(tl.float32)
    target = parts + pair[None, :] * hidden + row[:, None]
    tl.store(target, acc * weight[None, :], mask=row_good & (place < count)[None, :])


def expert_ffn(
    x: Tensor, indices: Tensor, weights: Tensor, addresses: Tensor, expert_width: int,
    *, slab: tuple[int, int] | None = None, tiles: tuple[GroupedTiles, GroupedTiles] = (GATE_UP, DOWN),
) -> Tensor:  # fmt: skip
    """The routed experts of one MoE layer: sum over a token's experts of weight * down(silu(gate x) * up x).

    Arguments are those of `expert_parts`. Returns [T, H] bfloat16.
    """
    parts = torch.empty(*indices.shape, x.shape[1], dtype=torch.float32, device=x.device)  # [T, k, H]
    expert_parts(x, indices, weights, addresses, expert_width, parts, slab=slab, tiles=tiles)
    return combine(parts.flatten(0, 1), indices, addresses.shape[0], torch.empty_like(x))


def expert_parts(
    x: Tensor, indices: Tensor, weights: Tensor, addresses: Tensor, expert_width: int, parts: Tensor,
    *, slab: tuple[int, int] | None = None, tiles: tuple[GroupedTiles, GroupedTiles] = (GATE_UP, DOWN),
) -> None:  # fmt: skip
    """Every choice's weight * down(silu(gate x) * up x); `combine` sums them.

    Args:
        x: [T, H] bfloat16, T at most 64.
        indices: [T, k] experts used; for a value outside 0 .. E-1 nothing is computed or written.
        weights: [T, k] factors, any float type.
        addresses: [E] int64 on the device: where each expert's block of 3 I H bfloat16 starts, on a 16-byte boundary.
        expert_width: I.
        parts: [T, k, H] float32, to be filled in. The product of gate and up is rounded to bfloat16, sums are float32.
        slab: first and one-past-last address of the device slab; experts outside it are started first.
        tiles: shapes of the programs of the two launches.

    Raises:
        ValueError: wrong dtype or layout, or too many tokens.
    """
    tokens, top_k = indices.shape
    if x.dtype != torch.bfloat16 or addresses.dtype != torch.int64:
        raise ValueError(f"inputs are {x.dtype} and addresses {addresses.dtype}, bfloat16 and int64 are needed")
    if not (x.is_contiguous() and weights.is_contiguous() and addresses.is_contiguous() and parts.is_contiguous()):
        raise ValueError("inputs, weights, addresses and parts must be contiguous")
    routes = route(indices, addresses.shape[0], addresses, slab)
    if tokens:
        act = torch.empty(tokens * top_k, expert_width, dtype=torch.bfloat16, device=x.device)  # [P, I]
        _launch(x, weights, addresses, routes, act, parts, tiles)


def _launch(
    x: Tensor, weights: Tensor, addresses: Tensor, routes: Routes, act: Tensor, parts: Tensor,
    tiles: tuple[GroupedTiles, GroupedTiles],
) -> None:  # fmt: skip
    hidden, width = x.shape[1], act.shape[1]
    first, second = tiles
    slots = (routes.expert, routes.start, routes.count, routes.order, routes.num_experts, hidden, width)
    columns = max(16, triton.next_power_of_2(routes.tokens))
    pdl = overlaps_launches(x.device)
    _gate_up[(triton.cdiv(width, first.outputs), routes.slots)](
        x, addresses, act, *slots, TOP_K=routes.top_k, ROWS=first.outputs, TOKENS=columns, BLOCK_K=first.inputs,
        DIRECT=routes.direct, PDL=pdl, num_warps=first.warps, num_stages=first.stages, launch_pdl=pdl,
    )  # fmt: skip
    _down[(triton.cdiv(hidden, second.outputs), routes.slots)](
        act, addresses, weights, parts, *slots, ROWS=second.outputs, TOKENS=columns, BLOCK_K=second.inputs,
        DIRECT=routes.direct, PDL=pdl, num_warps=second.warps, num_stages=second.stages, launch_pdl=pdl,
    )  # fmt: skip
