"""Row-invariant dense layer: row i of the result is bitwise the same for any number of rows and any other rows.

Everything that decides the order of a sum (steps of the input width, its cuts among programs, the order in which the
cuts are added) depends on the weight's shape only. The program that finishes a tile last adds its cuts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specter_lab.engine.kernels.launch import overlaps_launches

_ROWS = 64  # weight rows of a program; 64 keeps the compiler on one tensor instruction for any number of tokens
_STEP = 128  # inputs per step
_MAX_TOKENS = 64  # of a program
_ENOUGH_PROGRAMS = 96  # to keep a GPU of 100 to 150 multiprocessors busy
_CROWD = (133, 264)  # programs that leave room for those of the next kernel only with smaller buffers
_MIN_STEPS = 2  # of a cut
_LINE = 64  # weights of a cache line
_AHEAD_LINES = 8  # of each weight row, asked for before the kernel before has ended


@dataclass(frozen=True)
class DenseTiles:
    """How a weight [N, K] is divided."""

    cuts: int  # of the input width
    stages: int = 4
    warps: int = 4


def tiles_for(outputs: int, inputs: int) -> DenseTiles:
    """Cut the inputs of a small weight [outputs, inputs] among programs, so that all multiprocessors have work."""
    cuts, steps, rows = 1, triton.cdiv(inputs, _STEP), triton.cdiv(outputs, _ROWS)
    while rows * cuts < _ENOUGH_PROGRAMS and steps // (2 * cuts) >= _MIN_STEPS:
        cuts *= 2
    return DenseTiles(cuts, stages=3 if _CROWD[0] <= rows * cuts <= _CROWD[1] else 4)


def new_arrivals(device: torch.device | str, tiles: int = 1 << 14) -> Tensor:
    """Counters that `linear` and `attend` need, zero before and after every call; one set per stream."""
    return torch.zeros(tiles, dtype=torch.int32, device=device)


@triton.jit
def _prefetch(pointers, good):
    """Ask for cache lines to come to the L2."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r", [pointers, good.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _linear(
    x, weight, bias, out, parts, arrivals, tokens, outputs, inputs, x_stride, weight_stride, cut_inputs,
    HAS_BIAS: tl.constexpr, CUTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    cut = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    k = cut * cut_inputs + tl.arange(0, BLOCK_K)
    weight_rows = weight + row.to(tl.int64)[:, None] * weight_stride + k[None, :]
    x_rows = x + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    row_good, token_good = (row < outputs)[:, None], (token < tokens)[:, None]
    if PDL:
        line = cut * cut_inputs + tl.arange(0, AHEAD) * LINE
        ahead = weight + row.to(tl.int64)[:, None] * weight_stride + line[None, :]
        _prefetch(ahead, row_good & (line < tl.minimum(inputs, (cut + 1) * cut_inputs))[None, :])
        gdc_wait()  # weights are not written by kernels, `x` may have been a moment ago
        gdc_launch_dependents()
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for k0 in range(0, cut_inputs, BLOCK_K):
        inside = (k0 + k < inputs)[None, :]
        block = tl.load(weight_rows + k0, mask=row_good & inside, other=0.0)
        columns = tl.trans(tl.load(x_rows + k0, mask=token_good & inside, other=0.0))  # [BLOCK_K, TOKENS]
        acc = tl.dot(block, columns, acc)
    good = row_good & (token < tokens)[None, :]
    place = token.to(tl.int64)[None, :] * outputs + row[:, None]
    if CUTS > 1:
        tl.store(parts + cut * tokens * outputs + place, acc, mask=good)
        tl.debug_barrier()  # the whole program has stored before it counts itself
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") < CUTS - 1:
            return
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        for other in tl.static_range(CUTS):
            part = parts + other * tokens * outputs + place
            acc += tl.load(part, mask=good, other=0.0, cache_modifier=".cg")  # other programs wrote it: not from L1
        tl.store(arrivals + tile, 0)
    if HAS_BIAS:
        acc += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=good)


def linear(
    x: Tensor, weight: Tensor, arrivals: Tensor, bias: Tensor | None = None, *,
    out_dtype: torch.dtype = torch.bfloat16, tiles: DenseTiles | None = None,
) -> Tensor:  # fmt: skip
    """x weight^T + bias, row-invariant.

    Args:
        x: [T, K] bfloat16, rows contiguous.
        weight: [N, K] bfloat16, rows contiguous.
        arrivals: counters of this stream (`new_arrivals`).
        bias: [N] or None.
        out_dtype: of the result; sums are float32.
        tiles: how the weight is divided; results are equal only between calls that use the same.

    Returns:
        [T, N].

    Raises:
        ValueError: wrong dtype or layout, or too few counters.
    """
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError("x and weight must be bfloat16 with contiguous rows")
    if weight.shape[1] != inputs:
        raise ValueError(f"rows of {inputs} inputs do not fit a weight {tuple(weight.shape)}")
    out = torch.empty(tokens, outputs, dtype=out_dtype, device=x.device)
    if tokens == 0:
        return out
    tiles = tiles or tiles_for(outputs, inputs)
    columns = min(_MAX_TOKENS, max(16, triton.next_power_of_2(tokens)))
    grid = (triton.cdiv(outputs, _ROWS), tiles.cuts, triton.cdiv(tokens, columns))
    parts, pdl = out, overlaps_launches(x.device)
    if tiles.cuts > 1:
        parts = torch.empty(tiles.cuts, tokens, outputs, dtype=torch.float32, device=x.device)
        if grid[0] * grid[2] > arrivals.shape[0]:
            raise ValueError(f"{grid[0] * grid[2]} tiles need as many counters, {arrivals.shape[0]} given")
    cut_inputs = triton.cdiv(triton.cdiv(inputs, _STEP), tiles.cuts) * _STEP
    _linear[grid](
        x, weight, out if bias is None else bias, out, parts, arrivals, tokens, outputs, inputs, x.stride(0),
        weight.stride(0), cut_inputs, HAS_BIAS=bias is not None, CUTS=tiles.cuts, ROWS=_ROWS, TOKENS=columns,
        BLOCK_K=_STEP, AHEAD=_AHEAD_LINES, LINE=_LINE, PDL=pdl, num_warps=tiles.warps, num_stages=tiles.stages,
        launch_pdl=pdl,
    )  # fmt: skip
    return out
