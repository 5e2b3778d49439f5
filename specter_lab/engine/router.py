"""From router logits to experts and weights, in plain torch; `kernels.router` does the same in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from specter_lab.engine.shape import Shape


def route(shape: Shape, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Experts [T, k] int64 and their weights [T, k] float32 from router logits [T, E]; of equal logits the first wins."""
    if shape.model_type == "phimoe":
        return _sparsemixer(logits, shape.router_jitter)
    shares = logits.float().softmax(dim=-1)
    indices = logits.sort(dim=-1, descending=True, stable=True).indices[:, : shape.top_k]
    weights = shares.gather(-1, indices)
    if shape.normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return indices, weights * shape.router_scale


def _sparsemixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Phi's router without its training noise (arXiv 2409.12136): the best two, each weighted by a softmax over those
    whose relative distance to it is at most twice the jitter."""
    scores, found, factors = logits, [], []
    for _ in range(2):
        best, index = scores.max(dim=-1, keepdim=True)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        found.append(index)
        factors.append(scores.masked_fill(far, float("-inf")).softmax(dim=-1).gather(-1, index))
        scores = scores.scatter(-1, index, float("-inf"))
    return torch.cat(found, dim=-1), torch.cat(factors, dim=-1).float()
