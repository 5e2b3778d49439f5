"""What a translator's layers are made of beside products, in plain torch; on a GPU each is one kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows [N, H] divided by their root mean square (float32), times the weight."""
    if x.is_cuda:
        from specter_lab.engine.kernels import norm

        return norm.norm(x, weight, None, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def self_attend(qkv: Tensor, cache: Tensor, owner: Tensor, bias: Tensor, position: Tensor) -> Tensor:
    """Found [R, heads D] by rows [R, 3 heads D] in their past and themselves; new keys and values go into the cache.

    A beam that goes on from another one reads that one's cache, so no cache is ever copied.

    Args:
        cache: keys and values [2, B, heads, beam, S, D].
        owner: [B, beam, S] which beam wrote each token of a beam's past.
        bias: [heads, S, S] added to the scores of a query and a key; it hides what comes later.
        position: [1] of the new tokens.
    """
    if qkv.is_cuda:
        from specter_lab.engine.kernels import cached_attention

        return cached_attention.self_attend(qkv, *cache, owner, bias, position)
    _, batch, heads, beam, steps, dim = cache.shape
    q, *new = qkv.view(batch, beam, 3, heads, dim).permute(2, 0, 3, 1, 4)  # [B, heads, beam, D]
    cache.index_copy_(4, position, torch.stack(new)[..., None, :])
    past = int(position) + 1
    if beam == 1:
        k, v = cache[:, :, :, 0, :past]  # [B, heads, past, D]
    else:  # rows of D numbers, each from the beam that wrote it
        sentence, head, token = (
            torch.arange(batch)[:, None, None, None],
            torch.arange(heads)[:, None],
            torch.arange(past),
        )
        rows = ((sentence * heads + head) * beam + owner[:, :, None, :past]) * steps + token  # [B, beam, heads, past]
        k, v = cache.view(2, -1, dim).index_select(1, rows.flatten()).view(2, -1, heads, past, dim)
    q = q.transpose(1, 2).reshape(-1, heads, 1, dim)
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, past - 1 : past, :past], scale=1.0)
    return found.flatten(1)


def cross_attend(q: Tensor, cache: Tensor, mask: Tensor) -> Tensor:
    """Found [R, heads D] by rows [R, heads D] in their sentence's source.

    Args:
        cache: keys and values [2, B, heads, S, D].
        mask: [B, 1, 1, S] added to the scores.
    """
    if q.is_cuda:
        from specter_lab.engine.kernels import cached_attention

        return cached_attention.cross_attend(q, *cache, mask)
    _, batch, heads, _, dim = cache.shape
    query = q.view(batch, -1, heads, dim).transpose(1, 2)  # [B, heads, beam, D]
    return F.scaled_dot_product_attention(query, *cache, attn_mask=mask, scale=1.0).transpose(1, 2).reshape(q.shape)


def route(router: Tensor, hidden: Tensor, finished: Tensor | None) -> tuple[Tensor, Tensor]:
    """Expert [N] and its probability [N] of tokens [N, H]; finished tokens get the id past the last."""
    if hidden.is_cuda:
        from specter_lab.engine.kernels import router as kernels

        if len(router) <= kernels.MAX_EXPERTS:
            return kernels.top_1(router, hidden, finished)
    factors, experts = F.linear(hidden.float(), router).softmax(-1).max(-1)
    return (experts if finished is None else experts.masked_fill(finished, len(router))), factors


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token [R] of the largest logit of every row [R, V], that logit and the log-sum-exp of the row, float32 both."""
    if logits.is_cuda:
        from specter_lab.engine.kernels import likeliest as kernels

        return kernels.likeliest(logits)
    top, token = logits.max(-1)
    return token, top.float(), logits.float().logsumexp(-1)
