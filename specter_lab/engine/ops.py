"""The operations a pass is made of, as one of two sets: torch's own, and the row-invariant kernels.

Row-invariant means that a token's result is bitwise the same whatever other tokens share the pass: then verifying K + 1
tokens at once gives what K + 1 plain steps give, and speculative decoding is exact, not only in exact arithmetic
(PAPERS.md, trap 9). On a CPU `TorchOps` computes every row alone when asked to, slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, silu

from specter_lab.engine import rotary, router
from specter_lab.engine.rotary import Table
from specter_lab.engine.shape import Shape

if TYPE_CHECKING:
    from specter_lab.engine.decoder import Linear, Norm


class Ops(Protocol):
    """What `decoder.forward` calls; `TorchOps` says what each computes."""

    def linear(self, x: Tensor, weights: Linear) -> Tensor: ...

    def norm(self, x: Tensor, weights: Norm, eps: float) -> Tensor: ...

    def add_norm(
        self, x: Tensor, y: Tensor, weights: Norm, eps: float, shared: Tensor | None = None, gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def enter(self, x: Tensor, entry: Linear, width: int) -> tuple[Tensor, Tensor]: ...

    def route(self, shape: Shape, logits: Tensor, indices: Tensor, weights: Tensor) -> None: ...

    def rotate_and_store(
        self, shape: Shape, entry: Tensor, expanded: Tensor | None, keys: Tensor, values: Tensor, table: Table,
        position: Tensor,
    ) -> Tensor: ...  # fmt: skip

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

    def add_norm(
        self, x: Tensor, y: Tensor, weights: Norm, eps: float, shared: Tensor | None = None, gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x + y + sigmoid(gate) * shared, and its norm: [T, H] each; gate [T, 1], or [T, 0] for shared as it is."""
        if shared is not None:
            y = y + (torch.sigmoid(gate).to(x.dtype) * shared if gate.shape[1] else shared)
        x = x + y
        return x, self.norm(x, weights, eps)

    def enter(self, x: Tensor, entry: Linear, width: int) -> tuple[Tensor, Tensor]:
        """silu(gate) * up [T, I] of the first 2I rows of `entry`, which alternate, and what the others give [T, E + G]."""
        inner, rest = self.linear(x, entry).tensor_split([2 * width], dim=1)
        gate, up = inner.unflatten(1, (width, 2)).unbind(-1)
        return silu(gate) * up, rest.float()

    def route(self, shape: Shape, logits: Tensor, indices: Tensor, weights: Tensor) -> None:
        """Fill `indices` [T, k] and `weights` [T, k] from logits [T, E]."""
        for into, found in zip((indices, weights), router.route(shape, logits)):
            into.copy_(found)

    def rotate_and_store(
        self, shape: Shape, entry: Tensor, expanded: Tensor | None, keys: Tensor, values: Tensor, table: Table,
        position: Tensor,
    ) -> Tensor:  # fmt: skip
        return rotary.rotate_and_store(shape, entry, expanded, keys, values, table, position)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float) -> Tensor:
        """q [T, heads, D] over caches [B, S, KV heads, D], T / B tokens of each request in turn; its token t sees the first
        position + t + 1 entries."""
        if len(position) > 1:
            lanes = zip(q.chunk(len(position)), k.split(1), v.split(1), position.split(1))
            return torch.cat([self.attend(*lane, scale) for lane in lanes])
        k, v = k[0], v[0]
        tokens, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
        if self.by_row and tokens > 1:
            rows = (self.attend(q[t : t + 1], k[None], v[None], position + t, scale) for t in range(tokens))
            return torch.cat(list(rows))
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
