"""Root-mean-square norm and layer norm, one program per row: a row's result does not depend on the others.

`add_norm` first adds up what a layer's halves leave in the residual stream, in the same launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specter_lab.engine.kernels.launch import overlaps_launches


@triton.jit
def _norm(
    x, y, shared, gate, weight, bias, total, out, x_stride, gate_stride, width, eps,
    ADD: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()  # before the wait: the next kernel asks for its weights meanwhile
        gdc_wait()
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(y + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if SHARED:
            term = tl.load(shared + row * width + column, mask=inside, other=0.0).to(tl.float32)
            if GATED:
                term = term / (1.0 + tl.exp(-tl.load(gate + row * gate_stride).to(tl.float32)))
            values += term
        rounded = values.to(out.dtype.element_ty)
        tl.store(total + row * width + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if CENTRED:
        values = tl.where(inside, values - tl.sum(values, axis=0) / width, 0.0)
    values = values * tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    if CENTRED:
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
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, None, None, weight, bias, eps, out, out)
    return out


def add_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float, shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x + y + sigmoid(gate) * shared, rounded once, and the norm of it.

    Args:
        x: [T, H] on the device, contiguous as all but `gate`.
        y: [T, H].
        weight: [H].
        bias: [H] or None.
        shared: [T, H] or None.
        gate: [T, 1] any float type, rows anywhere; None or [T, 0]: `shared` is added as it is.

    Returns:
        [T, H] of the type of `x`, each.

    Raises:
        ValueError: shapes differ, or a layout that is not contiguous.
    """
    terms = [x, y] if shared is None else [x, y, shared]
    if not all(term.is_contiguous() and term.shape == x.shape for term in terms):
        raise ValueError(f"terms must be contiguous and of one shape, not {[tuple(term.shape) for term in terms]}")
    total, out = torch.empty_like(x), torch.empty_like(x)
    _launch(x, y, shared, gate, weight, bias, eps, total, out)
    return total, out


def _launch(
    x: Tensor, y: Tensor | None, shared: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor | None,
    eps: float, total: Tensor, out: Tensor,
) -> None:  # fmt: skip
    (tokens, width), pdl = x.shape, overlaps_launches(x.device)
    gated = shared is not None and gate is not None and gate.shape[1] == 1
    if tokens:
        _norm[(tokens,)](
            x, x if y is None else y, x if shared is None else shared, gate if gated else x, weight,
            weight if bias is None else bias, total, out, x.stride(0), gate.stride(0) if gated else 0, width, eps,
            ADD=y is not None, SHARED=shared is not None, GATED=gated, CENTRED=bias is not None,
            BLOCK=triton.next_power_of_2(width), PDL=pdl, num_warps=8, launch_pdl=pdl,
        )  # fmt: skip
