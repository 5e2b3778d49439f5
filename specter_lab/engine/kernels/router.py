"""From router logits to experts and weights in one launch, one program per token; or from hidden states, for one expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specter_lab.engine.kernels.launch import overlaps_launches

MAX_EXPERTS = 128
_PRODUCTS = 16384  # of a step of `top_1`: tokens x experts x inputs
_FEW_TOKENS = 512  # up to as many, a token has a program of its own


@triton.jit
def _best(scores, expert, EXPERTS: tl.constexpr):
    """Largest score and the first expert that has it."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, expert, EXPERTS - 1), axis=0)


@triton.jit
def _top_k(
    logits, indices, weights, stride, num_experts, scale, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
    EXPERTS: tl.constexpr, NORMALIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()  # before the wait: the next kernel asks for its weights meanwhile
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, EXPERTS), tl.arange(0, BLOCK_K)
    scores = tl.load(logits + token * stride + expert, mask=expert < num_experts, other=float("-inf"))
    top = tl.max(scores, axis=0)
    mass = tl.sum(tl.exp(scores - top), axis=0)
    chosen = tl.zeros([BLOCK_K], tl.int64)
    shares = tl.zeros([BLOCK_K], tl.float32)
    for place in tl.static_range(TOP_K):
        best, index = _best(scores, expert, EXPERTS)
        chosen = tl.where(choice == place, index.to(tl.int64), chosen)
        shares = tl.where(choice == place, tl.exp(best - top) / mass, shares)
        scores = tl.where(expert == index, float("-inf"), scores)
    if NORMALIZED:
        shares = shares / tl.sum(shares, axis=0)
    tl.store(indices + token * TOP_K + choice, chosen, mask=choice < TOP_K)
    tl.store(weights + token * TOP_K + choice, shares * scale, mask=choice < TOP_K)


@triton.jit
def _sparsemixer(
    logits, indices, weights, stride, num_experts, jitter, EXPERTS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    known = expert < num_experts
    raw = tl.load(logits + token * stride + expert, mask=known, other=0.0)
    scores = tl.where(known, raw, float("-inf"))
    for place in tl.static_range(2):
        best, index = _best(scores, expert, EXPERTS)
        far = (best - raw) / tl.maximum(tl.abs(raw), best) > 2 * jitter
        mass = tl.sum(tl.where(far, 0.0, tl.exp(scores - best)), axis=0)
        tl.store(indices + token * 2 + place, index.to(tl.int64))
        tl.store(weights + token * 2 + place, 1.0 / mass)  # the best one's own share is exp(0)
        scores = tl.where(expert == index, float("-inf"), scores)


@triton.jit
def _top_1(
    router, hidden, finished, expert_out, share_out, tokens, num_experts, width, FINISHED: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()  # before the wait: the next kernel asks for its weights meanwhile
        gdc_wait()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    known, good = expert < num_experts, token < tokens
    products = tl.zeros([TOKENS, EXPERTS, INPUTS], tl.float32)
    for first in range(0, width, INPUTS):
        i = first + tl.arange(0, INPUTS)
        inside = (i < width)[None, :]
        row = tl.load(router + expert[:, None] * width + i[None, :], mask=known[:, None] & inside, other=0.0)
        x = tl.load(hidden + token.to(tl.int64)[:, None] * width + i[None, :], mask=good[:, None] & inside, other=0.0)
        products += x.to(tl.float32)[:, None, :] * row[None, :, :]
    logits = tl.where(known[None, :], tl.sum(products, axis=2), float("-inf"))  # [T, E]
    best = tl.max(logits, axis=1)
    chosen = tl.min(tl.where(logits == best[:, None], expert[None, :], num_experts - 1), axis=1)
    if FINISHED:
        chosen = tl.where(tl.load(finished + token, mask=good, other=0) != 0, num_experts, chosen)
    tl.store(expert_out + token, chosen.to(tl.int64), mask=good)
    tl.store(share_out + token, 1.0 / tl.sum(tl.exp(logits - best[:, None]), axis=1), mask=good)


def top_1(router: Tensor, hidden: Tensor, finished: Tensor | None) -> tuple[Tensor, Tensor]:
    """The likeliest expert of every token; of equal logits the first expert wins.

    Args:
        router: [E, H] float32, E at most 128, contiguous.
        hidden: [T, H] any float type, contiguous; products and sums are float32.
        finished: [T] bool, contiguous, tokens that get expert E; or None.

    Returns:
        expert [T] int64 and its softmax probability [T] float32.

    Raises:
        ValueError: wrong dtype or layout, or too many experts.
    """
    if router.dtype != torch.float32 or not all(t is None or t.is_contiguous() for t in (router, hidden, finished)):
        raise ValueError(f"the router is {router.dtype}: float32 is needed, and contiguous rows of everything")
    (tokens, width), num_experts, pdl = hidden.shape, len(router), overlaps_launches(hidden.device)
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"{num_experts} experts, the limit is {MAX_EXPERTS}")
    experts = torch.empty(tokens, dtype=torch.int64, device=hidden.device)
    shares = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
    each, block = 1 if tokens <= _FEW_TOKENS else 8, _block(num_experts)
    inputs = min(triton.next_power_of_2(width), _PRODUCTS // (each * block))
    if tokens:
        _top_1[(triton.cdiv(tokens, each),)](
            router, hidden, hidden if finished is None else finished, experts, shares, tokens, num_experts, width,
            FINISHED=finished is not None, TOKENS=each, EXPERTS=block, INPUTS=inputs, PDL=pdl, num_warps=8,
            launch_pdl=pdl,
        )  # fmt: skip
    return experts, shares


def top_k(logits: Tensor, indices: Tensor, weights: Tensor, *, normalized: bool, scale: float) -> None:
    """Softmax over the experts, then the largest k; of equal logits the first expert wins.

    Args:
        logits: [T, E] float32, E at most 128, a row contiguous.
        indices: [T, k] int64, contiguous; written.
        weights: [T, k] float32, contiguous; written: shares, divided by their sum if `normalized`, times `scale`.

    Raises:
        ValueError: wrong dtype or layout, or too many experts.
    """
    _check(logits, indices, weights)
    (tokens, num_experts), k, pdl = logits.shape, indices.shape[1], overlaps_launches(logits.device)
    if tokens:
        _top_k[(tokens,)](
            logits, indices, weights, logits.stride(0), num_experts, scale, TOP_K=k, BLOCK_K=triton.next_power_of_2(k),
            EXPERTS=_block(num_experts), NORMALIZED=normalized, PDL=pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip


def sparsemixer(logits: Tensor, indices: Tensor, weights: Tensor, *, jitter: float) -> None:
    """The best two, each weighted by a softmax over those not far from it; see `engine.router`.

    Args:
        logits: [T, E] float32, E at most 128, a row contiguous.
        indices: [T, 2] int64, contiguous; written.
        weights: [T, 2] float32, contiguous; written.
        jitter: experts are far whose relative distance is more than twice this.

    Raises:
        ValueError: wrong dtype or layout, or too many experts.
    """
    _check(logits, indices, weights)
    (tokens, num_experts), pdl = logits.shape, overlaps_launches(logits.device)
    if indices.shape[1] != 2:
        raise ValueError(f"the sparsemixer chooses 2 experts, not {indices.shape[1]}")
    if tokens:
        _sparsemixer[(tokens,)](
            logits, indices, weights, logits.stride(0), num_experts, jitter, EXPERTS=_block(num_experts), PDL=pdl,
            num_warps=1, launch_pdl=pdl,
        )  # fmt: skip


def _block(num_experts: int) -> int:
    return max(2, triton.next_power_of_2(num_experts))


def _check(logits: Tensor, indices: Tensor, weights: Tensor) -> None:
    found = logits.dtype, indices.dtype, weights.dtype
    if found != (torch.float32, torch.int64, torch.float32):
        raise ValueError(f"logits, indices and weights are {found}: float32, int64 and float32 are needed")
    if logits.stride(1) != 1 or not (indices.is_contiguous() and weights.is_contiguous()):
        raise ValueError("rows of logits, indices and weights must be contiguous")
    if logits.shape[1] > MAX_EXPERTS:
        raise ValueError(f"{logits.shape[1]} experts, the limit is {MAX_EXPERTS}")
