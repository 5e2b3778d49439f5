"""Root-mean-square norm and layer norm, one program per row: a row's result does not depend on the others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specter_lab.engine.kernels.launch import overlaps_launches


@triton.jit
def _norm(
    x, weight, bias, out, stride, width, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        values = tl.where(inside, values - tl.sum(values, axis=0) / width, 0.0)
    values = values * tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        result = values * factor + shift
    else:
        result = values.to(out.dtype.element_ty).to(tl.float32) * factor  # rounded before the weight, as the models do
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm of every row, or layer norm when there is a bias.

    Args:
        x: [T, H] on the device, rows contiguous.
        weight: [H].
        bias: [H] or None.

    Returns:
        [T, H] of the type of `x`, contiguous.
    """
    tokens, width = x.shape
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if tokens:
        pdl = overlaps_launches(x.device)
        _norm[(tokens,)](
            x, weight, weight if bias is None else bias, out, x.stride(0), width, eps, CENTRED=bias is not None,
            BLOCK=triton.next_power_of_2(width), PDL=pdl, num_warps=8, launch_pdl=pdl,
        )  # fmt: skip
    return out
