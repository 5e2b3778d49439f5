"""The row-invariant kernels as the operations of a pass, for BF16 on a CUDA device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specter_lab.engine.decoder import Linear, Norm
from specter_lab.engine.kernels import attention, dense, rotary, router
from specter_lab.engine.kernels import norm as norms
from specter_lab.engine.kernels.rotary import HeadSource
from specter_lab.engine.rotary import Table
from specter_lab.engine.shape import Shape


@dataclass(frozen=True)
class KernelOps:
    """Row i of every result is bitwise the same whatever the other rows are. `ops.TorchOps` says what each computes."""

    arrivals: Tensor  # counters of one stream

    def linear(self, x: Tensor, weights: Linear) -> Tensor:
        return dense.linear(x, weights.weight, self.arrivals, weights.bias)

    def norm(self, x: Tensor, weights: Norm, eps: float) -> Tensor:
        return norms.norm(x, weights.weight, weights.bias, eps)

    def add_norm(
        self, x: Tensor, y: Tensor, weights: Norm, eps: float, shared: Tensor | None = None, gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return norms.add_norm(x, y, weights.weight, weights.bias, eps, shared, gate)

    def enter(self, x: Tensor, entry: Linear, width: int) -> tuple[Tensor, Tensor]:
        return dense.gated(x, entry.weight, self.arrivals, width, entry.bias)

    def route(self, shape: Shape, logits: Tensor, indices: Tensor, weights: Tensor) -> None:
        if shape.model_type == "phimoe":
            router.sparsemixer(logits, indices, weights, jitter=shape.router_jitter)
        else:
            router.top_k(logits, indices, weights, normalized=shape.normalized, scale=shape.router_scale)

    def rotate_and_store(
        self, shape: Shape, entry: Tensor, expanded: Tensor | None, keys: Tensor, values: Tensor, table: Table,
        position: Tensor,
    ) -> Tensor:  # fmt: skip
        queries, plain = shape.heads * shape.key_dim, shape.key_dim - shape.rotary_dim
        q = HeadSource(entry, shape.key_dim)
        if shape.latent:
            k = HeadSource(expanded, plain + shape.value_dim)
            turning = HeadSource(entry[:, queries + shape.latent :], 0)
            v = HeadSource(expanded[:, plain:], plain + shape.value_dim)
        else:
            k = turning = HeadSource(entry[:, queries:], shape.key_dim)
            v = HeadSource(entry[:, queries + shape.kv_heads * shape.key_dim :], shape.value_dim)
        return rotary.rotate_and_store(
            q, k, turning, v, keys, values, table, position, heads=shape.heads, pairs=bool(shape.latent)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float) -> Tensor:
        return attention.attend(q, k, v, position, scale, self.arrivals)


def kernel_ops(device: torch.device | str) -> KernelOps:
    return KernelOps(dense.new_arrivals(device))
