"""Attention of one token per row over a static cache with an additive bias, as a translator's decoder step needs it.

A program is one head of one row. It reads whole rows of the layer's projection and writes a row of heads side by side, so
no other kernel turns anything around. Scores are not scaled (T5); softmax and sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specter_lab.engine.kernels.launch import overlaps_launches

_KEYS = 32  # positions per step


@triton.jit
def _attend(
    rows, keys, values, owner, bias, position, out, heads, beam, size, dim, row_stride, bias_stride_b, bias_stride_h,
    SELF: tl.constexpr, BEAMS: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()  # before the wait: the next kernel asks for its weights meanwhile
        gdc_wait()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sentence = row // beam
    d = tl.arange(0, BLOCK_D)
    inside = d < dim
    query_of = rows + row * row_stride + head * dim + d
    query = tl.load(query_of, mask=inside, other=0.0).to(tl.float32)
    bias += sentence * bias_stride_b + head * bias_stride_h
    if SELF:
        first_place = (sentence * heads + head) * beam * size  # of this sentence and head in the cache
        last = tl.load(position).to(tl.int32)
        length = last + 1
        bias += last * size
        key = tl.load(query_of + heads * dim, mask=inside, other=0.0)
        value = tl.load(query_of + 2 * heads * dim, mask=inside, other=0.0)
        own = (first_place + row % beam * size + last) * dim + d
        tl.store(keys + own, key, mask=inside)
        tl.store(values + own, value, mask=inside)
    else:
        first_place = (sentence * heads + head) * size
        last = size  # all lies in the cache
        length = size
    top = float("-inf")
    mass = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, length, KEYS):
        s = first + tl.arange(0, KEYS)
        there = s < length
        place = first_place + s
        if BEAMS:
            place += tl.load(owner + row * size + s, mask=s < last, other=0) * size
        at = place[:, None] * dim + d[None, :]
        good = (s < last)[:, None] & inside[None, :]
        k = tl.load(keys + at, mask=good, other=0.0).to(tl.float32)  # [S, D]
        v = tl.load(values + at, mask=good, other=0.0).to(tl.float32)
        if SELF:
            k = tl.where((s == last)[:, None], key.to(tl.float32)[None, :], k)
            v = tl.where((s == last)[:, None], value.to(tl.float32)[None, :], v)
        score = tl.sum(k * query[None, :], axis=1) + tl.load(bias + s, mask=there, other=0.0).to(tl.float32)
        score = tl.where(there, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=0))
        share = tl.exp(score - new_top)
        shrink = tl.exp(top - new_top)
        mass = mass * shrink + tl.sum(share, axis=0)
        acc = acc * shrink + tl.sum(share[:, None] * v, axis=0)
        top = new_top
    tl.store(out + (row * heads + head) * dim + d, (acc / mass).to(out.dtype.element_ty), mask=inside)


def self_attend(qkv: Tensor, keys: Tensor, values: Tensor, owner: Tensor, bias: Tensor, position: Tensor) -> Tensor:
    """Put the new keys and values into the cache, and attend to every row's past and itself.

    Args:
        qkv: [R, 3 heads D] queries, keys, values of R = B beam rows, any float type as all but `owner` and `position`.
        keys: [B, heads, beam, S, D], written at `position`.
        values: the same.
        owner: [B, beam, S] int64, which beam wrote each token of a beam's past; not read for a beam of one.
        bias: [heads, S, S], added to the scores of a query at one position and a key at another.
        position: [1] integer on the device, less than S. Nothing behind it is read.

    Returns:
        [R, heads D].

    Raises:
        ValueError: shapes that do not fit, or a layout that is not contiguous.
    """
    batch, heads, beam, size, dim = keys.shape
    _check(qkv, (batch * beam, 3 * heads * dim), keys, values, owner, bias)
    return _launch(qkv, keys, values, owner, bias, position, heads, beam, size, dim, 0, size * size)


def cross_attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attend to the source of every row's sentence.

    Args:
        q: [R, heads D] of R = B beam rows, any float type as all others.
        keys: [B, heads, S, D].
        values: the same.
        mask: [B, 1, 1, S], added to the scores.

    Returns:
        [R, heads D].

    Raises:
        ValueError: shapes that do not fit, or a layout that is not contiguous.
    """
    batch, heads, size, dim = keys.shape
    beam = len(q) // batch
    _check(q, (batch * beam, heads * dim), keys, values, mask)
    return _launch(q, keys, values, None, mask, None, heads, beam, size, dim, size, 0)


def _check(rows: Tensor, expected: tuple[int, int], keys: Tensor, values: Tensor, *others: Tensor) -> None:
    if rows.shape != expected or keys.shape != values.shape:
        raise ValueError(f"rows {tuple(rows.shape)} over keys {tuple(keys.shape)} and values {tuple(values.shape)}")
    if not all(tensor.is_contiguous() for tensor in (rows, keys, values, *others)):
        raise ValueError("rows, caches and bias must be contiguous")


def _launch(
    rows: Tensor, keys: Tensor, values: Tensor, owner: Tensor | None, bias: Tensor, position: Tensor | None, heads: int,
    beam: int, size: int, dim: int, bias_stride_b: int, bias_stride_h: int,
) -> Tensor:  # fmt: skip
    own, pdl = position is not None, overlaps_launches(rows.device)
    out = torch.empty(len(rows), heads * dim, dtype=rows.dtype, device=rows.device)
    if len(rows):
        _attend[(len(rows), heads)](
            rows, keys, values, owner if own else rows, bias, position if own else rows, out, heads, beam, size, dim,
            rows.stride(0), bias_stride_b, bias_stride_h, SELF=own, BEAMS=own and beam > 1,
            BLOCK_D=max(16, triton.next_power_of_2(dim)), KEYS=_KEYS, PDL=pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
    return out
