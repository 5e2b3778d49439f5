"""The row-invariant kernels as the operations of a pass, for BF16 on a CUDA device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specter_lab.engine.decoder import Linear, Norm
from specter_lab.engine.kernels import attention, dense
from specter_lab.engine.kernels import norm as norms


@dataclass(frozen=True)
class KernelOps:
    """Row i of every result is bitwise the same whatever the other rows are."""

    arrivals: Tensor  # counters of one stream

    def linear(self, x: Tensor, weights: Linear) -> Tensor:
        return dense.linear(x, weights.weight, self.arrivals, weights.bias)

    def norm(self, x: Tensor, weights: Norm, eps: float) -> Tensor:
        return norms.norm(x, weights.weight, weights.bias, eps)

    def router_logits(self, x: Tensor, router: Tensor) -> Tensor:
        return dense.linear(x, router, self.arrivals, out_dtype=torch.float32)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float) -> Tensor:
        return attention.attend(q, k, v, position, scale, self.arrivals)


def kernel_ops(device: torch.device | str) -> KernelOps:
    return KernelOps(dense.new_arrivals(device))
