"""Three ways to compute the top-1 experts of a sparse layer; all take an expert id past the last as "not at all".

`LoopExperts` is the baseline: expert after expert, the host asking each time which tokens it has, as the class in
transformers does. `SortedExperts` sorts the tokens first and touches only experts in use (any device, plain torch).
`ChannelExperts` is the grouped GEMM with fused dequantisation, two launches and no question to the host (CUDA).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from specter_lab.compress import per_channel
from specter_lab.engine.kernels import channel_gemm
from specter_lab.engine.kernels.channel_gemm import ChannelWeights

# (x [T, H], experts [T], factors [T], out [T, H]): adds factor * wo(relu(wi x)) to `out`, nothing where the id is past
# the last expert
Experts = Callable[[Tensor, Tensor, Tensor, Tensor], object]


@dataclass(frozen=True)
class LoopExperts:
    """Expert after expert."""

    wi: Tensor  # [E, H, F]
    wo: Tensor  # [E, F, H]

    def __call__(self, x: Tensor, experts: Tensor, factors: Tensor, out: Tensor) -> None:
        for expert in range(len(self.wi)):
            rows = (experts == expert).nonzero().flatten()  # waits for the device
            if len(rows):
                found = (x[rows] @ self.wi[expert]).relu_() @ self.wo[expert]
                out.index_add_(0, rows, found * factors[rows, None].to(found.dtype))


@dataclass(frozen=True)
class SortedExperts:
    """Tokens sorted by expert, then one pair of products per expert in use."""

    wi: Tensor  # [E, H, F]
    wo: Tensor  # [E, F, H]

    def __call__(self, x: Tensor, experts: Tensor, factors: Tensor, out: Tensor) -> None:
        work = channel_gemm.sort_tokens(experts.cpu(), len(self.wi), max(1, len(x)))  # the host asks for it all
        order = work.order.long().to(x.device)
        for expert, start, count in zip(work.expert.tolist(), work.start.tolist(), work.count.tolist()):
            if count:
                rows = order[start : start + count]
                found = (x[rows] @ self.wi[expert]).relu_() @ self.wo[expert]
                out.index_add_(0, rows, found * factors[rows, None].to(found.dtype))


@dataclass(frozen=True)
class ChannelExperts:
    """The kernels."""

    wi: ChannelWeights
    wo: ChannelWeights

    def __call__(self, x: Tensor, experts: Tensor, factors: Tensor, out: Tensor) -> None:
        channel_gemm.expert_ffn(x, experts, factors, self.wi, self.wo, out)


def channel_experts(wi: Tensor, wo: Tensor, kind: str, divisor: str = per_channel.CLIPPING) -> ChannelExperts:
    """Weights [E, M, N] for the kernels, quantised where `kind` says so."""

    def read(weights: Tensor) -> ChannelWeights:
        if kind == channel_gemm.HALF:
            return channel_gemm.half_weights(weights)
        return channel_gemm.packed_weights(per_channel.quantize(weights, channel_gemm.BITS[kind], divisor), kind)

    return ChannelExperts(read(wi), read(wo))
