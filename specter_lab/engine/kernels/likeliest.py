"""The likeliest token of every row of logits and its log probability, in one reading of the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specter_lab.engine.kernels.launch import overlaps_launches

_BLOCK = 8192
_LOWEST = tl.constexpr(-3.0e38)  # finite: differences between two of them are not NaN


@triton.jit
def _likeliest(logits, token_out, top_out, log_sum_out, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()  # before the wait: the next kernel asks for its weights meanwhile
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], _LOWEST, tl.float32)  # of every lane: largest logit, the first token that has it, and the
    token = tl.zeros([BLOCK], tl.int32)  # sum of exponentials over that of the largest
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        column = first + lane
        logit = tl.load(logits + row * vocab + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        larger = logit > top
        share = tl.exp(tl.where(larger, top - logit, logit - top))
        mass = tl.where(larger, mass * share + 1.0, mass + share)
        token = tl.where(larger, column, token)
        top = tl.where(larger, logit, top)
    best = tl.max(top, axis=0)
    tl.store(token_out + row, tl.min(tl.where(top == best, token, vocab - 1), axis=0).to(tl.int64))
    tl.store(top_out + row, best)
    tl.store(log_sum_out + row, best + tl.log(tl.sum(mass * tl.exp(top - best), axis=0)))


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the largest logit of every row is, how large, and the logarithm of the sum of all exponentials.

    Args:
        logits: [R, V] any float type, contiguous. Of equal logits the first is taken.

    Returns:
        token [R] int64, logit [R] float32 and log-sum-exp [R] float32; the token's log probability is their difference.

    Raises:
        ValueError: a layout that is not contiguous.
    """
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous")
    (rows, vocab), pdl = logits.shape, overlaps_launches(logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    top, log_sum = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if rows:
        _likeliest[(rows,)](
            logits, token, top, log_sum, vocab, BLOCK=min(_BLOCK, max(64, triton.next_power_of_2(vocab))), PDL=pdl,
            num_warps=16, launch_pdl=pdl,
        )  # fmt: skip
    return token, top, log_sum
