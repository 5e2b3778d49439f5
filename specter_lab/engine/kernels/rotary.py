"""Rotary embedding of queries and keys, and the KV cache's new entries, in one launch: a program per token and head.

Keys and values may come from anywhere in rows of the layers before: see `HeadSource`. Positions are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specter_lab.engine.kernels.launch import overlaps_launches


@dataclass(frozen=True)
class HeadSource:
    """Where heads lie in the rows [T, N] of a tensor."""

    rows: Tensor  # [T, N], a row contiguous; begins at the first head's first element
    head_stride: int  # elements from head to head; 0: all heads share it

    @property
    def arguments(self) -> tuple[Tensor, int, int]:
        return self.rows, self.rows.stride(0), self.head_stride


@triton.jit
def _rotated(source, cos, sin, half, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Both members of every pair that turns, and where they belong."""
    i = tl.arange(0, HALF)
    first = 2 * i if PAIRS else i
    second = first + (1 if PAIRS else half)
    good = i < half
    a = tl.load(source + first, mask=good, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=good, other=0.0).to(tl.float32)
    c, s = tl.load(cos + i, mask=good, other=0.0), tl.load(sin + i, mask=good, other=0.0)
    return a * c - b * s, b * c + a * s, first, second, good


@triton.jit(do_not_specialize_on_alignment=["position"])  # a lane's lies anywhere
def _rotate_and_store(
    q, q_row, q_head, k, k_row, k_head, turning, turning_row, turning_head, v, v_row, v_head,
    out, keys, values, cos, sin, position, each, heads, key_stride_b, key_stride_s, key_stride_h,
    value_stride_b, value_stride_s, value_stride_h, plain, half, value_dim, PLAIN: tl.constexpr, HALF: tl.constexpr, VALUE: tl.constexpr, PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()  # before the wait: the next kernels ask for their weights meanwhile
        gdc_wait()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = token // each
    place = tl.load(position + lane).to(tl.int64) + token % each
    cos += place * half
    sin += place * half
    if head < heads:
        still = q + token * q_row + head * q_head
        source = still + plain
        target = out + (token * heads + head) * (plain + 2 * half)
    else:
        head -= heads
        still = k + token * k_row + head * k_head
        source = turning + token * turning_row + head * turning_head
        target = keys + lane * key_stride_b + place * key_stride_s + head * key_stride_h
        d = tl.arange(0, VALUE)
        value = tl.load(v + token * v_row + head * v_head + d, mask=d < value_dim, other=0.0)
        value_of = values + lane * value_stride_b + place * value_stride_s + head * value_stride_h
        tl.store(value_of + d, value, mask=d < value_dim)
    if PLAIN > 0:
        d = tl.arange(0, PLAIN)
        tl.store(target + d, tl.load(still + d, mask=d < plain, other=0.0), mask=d < plain)
    a, b, first, second, good = _rotated(source, cos, sin, half, HALF, PAIRS)
    tl.store(target + plain + first, a.to(out.dtype.element_ty), mask=good)
    tl.store(target + plain + second, b.to(out.dtype.element_ty), mask=good)


def rotate_and_store(
    q: HeadSource, k: HeadSource, turning: HeadSource, v: HeadSource, keys: Tensor, values: Tensor,
    table: tuple[Tensor, Tensor], position: Tensor, *, heads: int, pairs: bool,
) -> Tensor:  # fmt: skip
    """Rotate the queries and keys of T new tokens, T / B of each request in turn, and write keys and values behind its others.

    Args:
        q: queries, D elements a head of which the last are turned.
        k: elements of keys that are not turned.
        turning: elements of keys that are, which come after the others in the cache.
        v: values.
        keys: [B, S, KV heads, D] cache, last dimension contiguous; written.
        values: [B, S, KV heads, D_v] cache; written.
        table: cosine and sine of every position's angles, [S, R / 2] float32 and contiguous; R elements turn.
        position: [B] integers on the device, tokens of each request before the new ones; at most S - T / B.
        heads: of the queries.
        pairs: element 2 i turns with element 2 i + 1, else element i with element i + R / 2.

    Returns:
        Rotated queries [T, heads, D], contiguous.
    """
    tokens, (cos, sin) = len(q.rows), table
    (lanes, _, kv_heads, key_dim), value_dim, half = keys.shape, values.shape[3], cos.shape[1]
    plain, pdl = key_dim - 2 * half, overlaps_launches(keys.device)
    out = torch.empty(tokens, heads, key_dim, dtype=q.rows.dtype, device=keys.device)
    if tokens:
        _rotate_and_store[(tokens, heads + kv_heads)](
            *q.arguments, *k.arguments, *turning.arguments, *v.arguments, out, keys, values, cos, sin, position,
            tokens // lanes, heads, *keys.stride()[:3], *values.stride()[:3], plain, half, value_dim,
            PLAIN=triton.next_power_of_2(plain) if plain else 0, HALF=triton.next_power_of_2(half),
            VALUE=triton.next_power_of_2(value_dim), PAIRS=pairs, PDL=pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
    return out
