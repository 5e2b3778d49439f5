"""Grouped products with 16-bit weights by way of shared memory, for many tokens an expert.

A program computes as much as Hopper's asynchronous tensor-core instructions take, 64 tokens at least, so weights and
inputs are read from the L2 a few times only. With few tokens an expert most of that is empty: `channel_kernels` then.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specter_lab.engine.kernels.launch import overlaps_launches

K_STEP = 64  # inputs must be a multiple


@triton.jit
def _gemm(
    x, weights, factors, out, expert_of, start_of, count_of, order, inputs, outputs,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, GATHER: tl.constexpr,
    SCATTER: tl.constexpr, RELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: who computes what is known to the next kernel
    tile = tl.program_id(1)
    count = tl.load(count_of + tile)
    if count == 0:
        return
    start, expert = tl.load(start_of + tile), tl.load(expert_of + tile).to(tl.int64)
    n, k = tl.arange(0, TOKENS), tl.arange(0, INPUTS)
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    there, inside = n < count, row < outputs
    source = start + n
    if GATHER:
        source = tl.load(order + source, mask=there, other=0)
    x_of = x + source.to(tl.int64)[:, None] * inputs + k[None, :]  # [T, K]
    weights_of = weights + expert * outputs * inputs + row.to(tl.int64)[None, :] * inputs + k[:, None]  # [K, N]
    acc = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for first in range(0, inputs, INPUTS):
        part = tl.load(x_of + first, mask=there[:, None], other=0.0)
        acc = tl.dot(part, tl.load(weights_of + first, mask=inside[None, :], other=0.0), acc)
    if RELU:
        acc = tl.maximum(acc, 0.0)
    target = start + n
    if SCATTER:
        target = tl.load(order + target, mask=there, other=0)
        acc *= tl.load(factors + target, mask=there, other=0.0).to(tl.float32)[:, None]
    out_of = out + target.to(tl.int64)[:, None] * outputs + row[None, :]
    written = there[:, None] & inside[None, :]
    if SCATTER:
        acc += tl.load(out_of, mask=written, other=0.0).to(tl.float32)
    tl.store(out_of, acc.to(out.dtype.element_ty), mask=written)


def grouped(
    x: Tensor, weights: Tensor, tiles: tuple[Tensor, Tensor, Tensor], order: Tensor, out: Tensor, *, tile: int,
    outputs: int, warps: int, stages: int, gather: bool, factors: Tensor | None, relu: bool,
) -> None:  # fmt: skip
    """What `channel_gemm.linear` computes, of weights [E, N, M] of the type of `x` and tiles of at least 64 tokens.

    Args:
        tiles: expert, start and count of each, as in `channel_gemm.SortedTokens`.
        tile: tokens of one at most.
        outputs: of a program, with its warps and the stages of its pipeline.
    """
    pdl = overlaps_launches(x.device)
    _gemm[(triton.cdiv(weights.shape[1], outputs), len(tiles[0]))](
        x, weights, x if factors is None else factors, out, *tiles, order, weights.shape[2], weights.shape[1],
        OUTPUTS=outputs, TOKENS=tile, INPUTS=K_STEP, GATHER=gather, SCATTER=factors is not None,
        RELU=relu, PDL=pdl, num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
