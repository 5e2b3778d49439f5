"""The operations a pass is made of, as one of two sets: torch's own, and the row-invariant kernels.

Row-invariant means that a token's result is bitwise the same whatever other tokens share the pass: then verifying K + 1
tokens at once gives what K + 1 plain steps give, and speculative decoding is exact, not only in exact arithmetic
(PAPERS.md, trap 9). On a CPU `plain_ops` computes every row alone when asked to, slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

if TYPE_CHECKING:
    from specter_lab.engine.decoder import Linear, Norm


class Ops(Protocol):
    """What `decoder.forward` calls."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor: ...

    def norm(self, x: Tensor, norm: Norm, eps: float) -> Tensor: ...

    def router_logits(self, x: Tensor, router: Tensor) -> Tensor: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float) -> Tensor: ...


def norm(x: Tensor, weights: Norm, eps: float) -> Tensor:
    """Root-mean-square norm in float32, or layer norm: x [T, H]."""
    if weights.bias is not None:
        return layer_norm(x, x.shape[-1:], weights.weight, weights.bias, eps)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weights.weight * scaled.to(x.dtype)


@dataclass(frozen=True)
class TorchOps:
    """Torch's own kernels; `by_row` computes every token alone, which makes them row-invariant."""

    by_row: bool = False

    def linear(self, x: Tensor, weights: Linear) -> Tensor:
        return self._rows(lambda rows: linear(rows, weights.weight, weights.bias), x)

    def norm(self, x: Tensor, weights: Norm, eps: float) -> Tensor:
        return self._rows(lambda rows: norm(rows, weights, eps), x)

    def router_logits(self, x: Tensor, router: Tensor) -> Tensor:
        return self._rows(lambda rows: linear(rows.to(router.dtype), router), x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float) -> Tensor:
        """q [T, heads, D] over caches [S, KV heads, D]; token t sees the first position + t + 1 entries."""
        tokens, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
        if self.by_row and tokens > 1:
            return torch.cat([self.attend(q[t : t + 1], k, v, position + t, scale) for t in range(tokens)])
        wide_q = q.float().view(tokens, kv_heads, heads // kv_heads, -1)
        scores = torch.einsum("tghd,sgd->tghs", wide_q, k.float()) * scale
        visible = torch.arange(len(k), device=q.device) <= position + torch.arange(tokens, device=q.device)[:, None]
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))  # [T, KV heads, group, S]
        seen = torch.einsum("tghs,sgd->tghd", scores.softmax(dim=-1), v.float())
        return seen.flatten(1, 2).to(q.dtype)

    def _rows(self, compute, x: Tensor) -> Tensor:
        if self.by_row and len(x) > 1:
            return torch.cat([compute(row) for row in x.split(1)])
        return compute(x)
