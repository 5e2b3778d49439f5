"""Row-invariant dense layer: row i of the result is bitwise the same for any number of rows and any other rows.

Everything that decides the order of a sum (steps of the input width, its cuts among programs, the order in which the
cuts are added) depends on the weight's shape only. The program that finishes a tile last adds its cuts.

`gated` is the first layer of an MLP whose gate and up alternate row by row, so that a program holds both factors of its
products; further rows, of whatever else meets the same input, come out as they are.
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
_AHEAD_BYTES = 4 << 20  # of a weight, asked for before the kernel before has ended (on an H200 more made passes slower)
_RESIDENT = 264  # programs that can start before the kernel before has ended


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
def _prefetch(pointers, num_bytes):
    """Ask for stretches of memory to come to the L2; multiples of 16 bytes, none where the number is not positive."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [pointers, num_bytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _linear(
    x, weight, bias, out, rest, parts, arrivals, tokens, outputs, inputs, width, x_stride, weight_stride, cut_inputs,
    ahead, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, CUTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    cut = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    k = cut * cut_inputs + tl.arange(0, BLOCK_K)
    weight_rows = weight + row.to(tl.int64)[:, None] * weight_stride + k[None, :]
    x_rows = x + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    row_good, token_good = (row < outputs)[:, None], (token < tokens)[:, None]
    if PDL:
        thread = tl.arange(0, THREADS)  # one for every row asks; a warp does so lane by lane
        first = cut * cut_inputs
        asked = tl.minimum(tl.minimum(inputs, first + cut_inputs) - first, ahead)
        ahead_row = tl.program_id(0) * ROWS + thread * ROWS // THREADS
        asks = (thread % (THREADS // ROWS) == 0) & (ahead_row < outputs)
        _prefetch(weight + ahead_row.to(tl.int64) * weight_stride + first, tl.where(asks, 2 * asked, 0))
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
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [ROWS // 2, 2, TOKENS]), [0, 2, 1]))
        pair = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        value = gate / (1.0 + tl.exp(-gate)) * up
        place = token.to(tl.int64)[None, :] * width + pair[:, None]
        inner = (pair < width)[:, None] & (token < tokens)[None, :]
        tl.store(out + place, value.to(out.dtype.element_ty), mask=inner)
        place = token.to(tl.int64)[None, :] * (outputs - 2 * width) + row[:, None] - 2 * width
        tl.store(rest + place, acc, mask=good & (row >= 2 * width)[:, None])
    else:
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
    out = torch.empty(len(x), len(weight), dtype=out_dtype, device=x.device)
    _launch(x, weight, arrivals, bias, out, out, 0, tiles or tiles_for(*weight.shape))
    return out


def gated(
    x: Tensor, weight: Tensor, arrivals: Tensor, width: int, bias: Tensor | None = None, *,
    tiles: DenseTiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """silu(gate x) * up x of the first 2 I rows of a weight, which alternate, and what its other rows give; row-invariant.

    Args:
        x: [T, K] bfloat16, rows contiguous.
        weight: [2 I + R, K] bfloat16, rows contiguous: gate 0, up 0, gate 1, ..., then R others.
        arrivals: counters of this stream (`new_arrivals`).
        width: I.
        bias: [2 I + R] or None.
        tiles: how the weight is divided; results are equal only between calls that use the same.

    Returns:
        [T, I] bfloat16, of products in float32, and [T, R] float32.

    Raises:
        ValueError: wrong dtype or layout, or too few counters.
    """
    act = torch.empty(len(x), width, dtype=torch.bfloat16, device=x.device)
    rest = torch.empty(len(x), len(weight) - 2 * width, dtype=torch.float32, device=x.device)
    _launch(x, weight, arrivals, bias, act, rest, width, tiles or tiles_for(*weight.shape))
    return act, rest


def _launch(
    x: Tensor, weight: Tensor, arrivals: Tensor, bias: Tensor | None, out: Tensor, rest: Tensor, width: int,
    tiles: DenseTiles,
) -> None:  # fmt: skip
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError("x and weight must be bfloat16 with contiguous rows")
    if weight.shape[1] != inputs:
        raise ValueError(f"rows of {inputs} inputs do not fit a weight {tuple(weight.shape)}")
    if tokens == 0:
        return
    columns = min(_MAX_TOKENS, max(16, triton.next_power_of_2(tokens)))
    grid = (triton.cdiv(outputs, _ROWS), tiles.cuts, triton.cdiv(tokens, columns))
    parts, pdl = out, overlaps_launches(x.device)
    if tiles.cuts > 1:
        parts = torch.empty(tiles.cuts, tokens, outputs, dtype=torch.float32, device=x.device)
        if grid[0] * grid[2] > arrivals.shape[0]:
            raise ValueError(f"{grid[0] * grid[2]} tiles need as many counters, {arrivals.shape[0]} given")
    cut_inputs = triton.cdiv(triton.cdiv(inputs, _STEP), tiles.cuts) * _STEP
    _linear[grid](
        x, weight, weight if bias is None else bias, out, rest, parts, arrivals, tokens, outputs, inputs, width,
        x.stride(0), weight.stride(0), cut_inputs, _ahead(weight, cut_inputs, grid[0] * tiles.cuts),
        GATED=rest is not out, HAS_BIAS=bias is not None, CUTS=tiles.cuts, ROWS=_ROWS, TOKENS=columns,
        BLOCK_K=_STEP, THREADS=max(_ROWS, 32 * tiles.warps), PDL=pdl, num_warps=tiles.warps, num_stages=tiles.stages,
        launch_pdl=pdl,
    )  # fmt: skip


def _ahead(weight: Tensor, cut_inputs: int, programs: int) -> int:
    """Weights of a row's cut that a program asks for ahead, so that all programs together stay in `_AHEAD_BYTES`."""
    if weight.data_ptr() % 16 or weight.stride(0) % 8 or weight.shape[1] % 8:
        return 0  # the instruction needs stretches of 16 bytes
    row_bytes = min(2 * cut_inputs, _AHEAD_BYTES // (min(programs, _RESIDENT) * _ROWS))
    return row_bytes // 2 // 64 * 64
