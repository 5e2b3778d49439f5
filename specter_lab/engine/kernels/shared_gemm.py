"""Products with 16-bit weights by way of shared memory: grouped, for many tokens an expert, or one large layer's.

A program computes as much as Hopper's asynchronous tensor-core instructions take, 64 tokens at least, so weights and
inputs are read from the L2 a few times only. With few tokens an expert most of that is empty: `channel_kernels` then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specter_lab.engine.kernels.launch import overlaps_launches

K_STEP = 64  # inputs must be a multiple
_OUTPUTS, _STAGES = 128, 3


@triton.jit
def _gemm(
    x, weights, factors, out, expert_of, start_of, count_of, order, tokens, inputs, outputs,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, GROUPED: tl.constexpr, GATHER: tl.constexpr,
    SCATTER: tl.constexpr, RELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: who computes what is known to the next kernel
    tile = tl.program_id(1)
    if GROUPED:
        count = tl.load(count_of + tile)
        if count == 0:
            return
        start, expert = tl.load(start_of + tile), tl.load(expert_of + tile).to(tl.int64)
    else:
        start, expert = tile * TOKENS, 0
        count = tl.minimum(tokens - start, TOKENS)
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
        x, weights, x if factors is None else factors, out, *tiles, order, len(x), weights.shape[2], weights.shape[1],
        OUTPUTS=outputs, TOKENS=tile, INPUTS=K_STEP, GROUPED=True, GATHER=gather, SCATTER=factors is not None,
        RELU=relu, PDL=pdl, num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, M] times weight [N, M] transposed -> [T, N], for a layer so large that reading it is what takes time.

    Raises:
        ValueError: not both float16 or both bfloat16, a layout that is not contiguous, or M no multiple of 64.
    """
    if x.dtype not in (torch.float16, torch.bfloat16) or weight.dtype != x.dtype:
        raise ValueError(f"{x.dtype} times {weight.dtype}: float16 or bfloat16 are needed, the same of both")
    if not (x.is_contiguous() and weight.is_contiguous()) or x.shape[1] % K_STEP or x.shape[1] != weight.shape[1]:
        raise ValueError(f"{tuple(x.shape)} times {tuple(weight.shape)}: contiguous rows of a multiple of {K_STEP}")
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    tile, pdl = (64 if len(x) <= 64 else 128), overlaps_launches(x.device)
    if len(x):
        _gemm[(triton.cdiv(len(weight), _OUTPUTS), triton.cdiv(len(x), tile))](
            x, weight, x, out, x, x, x, x, len(x), x.shape[1], len(weight), OUTPUTS=_OUTPUTS, TOKENS=tile,
            INPUTS=K_STEP, GROUPED=False, GATHER=False, SCATTER=False, RELU=False, PDL=pdl, num_warps=4,
            num_stages=_STAGES, launch_pdl=pdl,
        )  # fmt: skip
    return out
