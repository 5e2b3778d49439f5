"""Row-invariant decode attention: T new tokens at the end of a context that lies in a static KV cache.

The keys are cut at fixed positions (every 256), and each cut is read in fixed blocks of 64, so that a row meets the
same blocks in the same order whatever T is: blocks and cuts past its own position change nothing, exactly. The program
that finishes a head last joins the cuts in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specter_lab.engine.kernels.launch import overlaps_launches

_QUERIES = 16  # rows (token, head of the group) of a program
_KEYS = 64  # positions per step
_CUT = 256  # positions per program
_LOG2E = 1.4426950408889634


@triton.jit(do_not_specialize_on_alignment=["position"])  # a lane's lies anywhere
def _attend(
    q, k, v, out, position, parts, stats, arrivals, tokens, tiles_each, heads, factor,
    k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, DIM_V: tl.constexpr, BLOCK_V: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()  # before the wait: the next kernel asks for its weights meanwhile
        gdc_wait()
    cut, kv_head, lane, tile = (
        tl.program_id(0),
        tl.program_id(1),
        tl.program_id(2) // tiles_each,
        tl.program_id(2) % tiles_each,
    )
    context = tl.load(position + lane).to(tl.int32)  # tokens of this request before the new ones
    k += lane.to(tl.int64) * k_stride_b
    v += lane.to(tl.int64) * v_stride_b
    q += lane * tokens * heads * DIM
    out += lane * tokens * heads * DIM_V
    length = context + tokens
    cuts = (length + CUT - 1) // CUT
    if cut >= cuts:
        return
    r = tile * QUERIES + tl.arange(0, QUERIES)  # [Q]
    token, head = r // GROUP, kv_head * GROUP + r % GROUP
    row_good = token < tokens
    last = context + token  # last position a row sees
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    query = tl.load(
        q + (token * heads + head)[:, None] * DIM + d[None, :], mask=row_good[:, None] & (d < DIM)[None, :], other=0.0
    )
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, BLOCK_V], tl.float32)
    for first in range(cut * CUT, tl.minimum(cut * CUT + CUT, length), KEYS):
        s = first + tl.arange(0, KEYS)  # [S]
        there = s < length
        keys = tl.load(
            k + s.to(tl.int64)[None, :] * k_stride_s + kv_head * k_stride_h + d[:, None],
            mask=there[None, :] & (d < DIM)[:, None], other=0.0,
        )  # fmt: skip
        values = tl.load(
            v + s.to(tl.int64)[:, None] * v_stride_s + kv_head * v_stride_h + dv[None, :],
            mask=there[:, None] & (dv < DIM_V)[None, :], other=0.0,
        )  # fmt: skip
        score = tl.dot(query, keys) * factor  # [Q, S], for powers of two
        score = tl.where(s[None, :] <= last[:, None], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet
        share = tl.exp2(score - safe_top[:, None])
        shrink = tl.exp2(top - safe_top)
        mass = mass * shrink + tl.sum(share, axis=1)
        acc = tl.dot(share.to(values.dtype), values, acc * shrink[:, None])
        top = new_top
    target = out + (token * heads + head)[:, None] * DIM_V + dv[None, :]
    good = row_good[:, None] & (dv < DIM_V)[None, :]
    if cuts > 1:
        tiles = tl.num_programs(1) * tl.num_programs(2)
        own = kv_head * tl.num_programs(2) + tl.program_id(2)
        rows = own * QUERIES + tl.arange(0, QUERIES)
        cut_rows = tiles * QUERIES
        tl.store(parts + (cut * cut_rows + rows)[:, None].to(tl.int64) * BLOCK_V + dv[None, :], acc)
        tl.store(stats + (cut * cut_rows + rows) * 2, top)
        tl.store(stats + (cut * cut_rows + rows) * 2 + 1, mass)
        tl.debug_barrier()  # the whole program has stored before it counts itself
        if tl.atomic_add(arrivals + own, 1, sem="acq_rel") < cuts - 1:
            return
        best = tl.full([QUERIES], float("-inf"), tl.float32)
        mass = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, BLOCK_V], tl.float32)
        for other in range(0, cuts):
            cut_top = tl.load(stats + (other * cut_rows + rows) * 2, cache_modifier=".cg")
            cut_mass = tl.load(stats + (other * cut_rows + rows) * 2 + 1, cache_modifier=".cg")
            cut_acc = tl.load(
                parts + (other * cut_rows + rows)[:, None].to(tl.int64) * BLOCK_V + dv[None, :], cache_modifier=".cg"
            )
            new_best = tl.maximum(best, cut_top)  # the first cut has keys for every row
            keep, add = tl.exp2(best - new_best), tl.exp2(cut_top - new_best)
            mass = mass * keep + cut_mass * add
            acc = acc * keep[:, None] + cut_acc * add[:, None]
            best = new_best
        tl.store(arrivals + own, 0)
    tl.store(target, (acc / mass[:, None]).to(out.dtype.element_ty), mask=good)


def attend(q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float, arrivals: Tensor) -> Tensor:
    """Causal attention of T new tokens, T / B of each request in turn, whose keys and values are in the cache already.

    Args:
        q: [T, heads, D] bfloat16, contiguous; a request's token t stands at its position + t and sees itself.
        k: [B, S, KV heads, D] bfloat16 cache, any strides but a contiguous last dimension; heads is a multiple of its
            heads. Reads stop at the context's end, so the rest may hold anything finite or not.
        v: [B, S, KV heads, D_v] cache.
        position: [B] integers on the device, tokens of each request before the new ones; at most S - T / B.
        scale: factor on the scores before the softmax.
        arrivals: counters of this stream (`dense.new_arrivals`).

    Returns:
        [T, heads, D_v].

    Raises:
        ValueError: wrong layout, or too few counters.
    """
    (tokens, heads, dim), (lanes, size, kv_heads, _), dim_v = q.shape, k.shape, v.shape[3]
    if heads % kv_heads or tokens % lanes or not q.is_contiguous() or k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError(f"{tokens} tokens of {lanes} requests, {heads} heads on {kv_heads} KV heads, or a layout that is not contiguous")  # fmt: skip
    out = torch.empty(tokens, heads, dim_v, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    group, pdl = heads // kv_heads, overlaps_launches(q.device)
    tiles_each = triton.cdiv(tokens // lanes * group, _QUERIES)
    grid = (triton.cdiv(size, _CUT), kv_heads, lanes * tiles_each)
    if grid[1] * grid[2] > arrivals.shape[0]:
        raise ValueError(f"{grid[1] * grid[2]} tiles need as many counters, {arrivals.shape[0]} given")
    block_v = max(16, triton.next_power_of_2(dim_v))
    rows = grid[0] * grid[1] * grid[2] * _QUERIES
    parts = torch.empty(rows, block_v, dtype=torch.float32, device=q.device)
    stats = torch.empty(rows, 2, dtype=torch.float32, device=q.device)  # largest score, sum of shares
    _attend[grid](
        q, k, v, out, position, parts, stats, arrivals, tokens // lanes, tiles_each, heads, scale * _LOG2E,
        *k.stride()[:3], *v.stride()[:3], GROUP=group, DIM=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), DIM_V=dim_v, BLOCK_V=block_v, QUERIES=_QUERIES,
        KEYS=_KEYS, CUT=_CUT, PDL=pdl, num_warps=4, num_stages=2, launch_pdl=pdl,
    )  # fmt: skip
    return out
