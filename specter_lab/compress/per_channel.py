"""Symmetric, range-based quantisation per output channel, without calibration (Elephants, arXiv 2211.10017).

Weights of E experts [E, M, N] (inputs by outputs) become codes of the same shape and FP16 scales [E, 1, N]. Which
divisor turns the range into a scale is not stated in the paper, so both are here. With 2^(b-1), the default, the
largest weight of a channel is cut to the highest code when it is positive; with 2^(b-1) - 1 nothing is cut and the
lowest code is never used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BITS = (4, 8)
CLIPPING, FULL_RANGE = "absmax / 2^(b-1)", "absmax / (2^(b-1) - 1)"
DIVISORS = (CLIPPING, FULL_RANGE)
_SMALLEST_SCALE = 2.0**-24  # smallest positive FP16 number: a channel of zeros divides by it, not by zero


@dataclass(frozen=True)
class ChannelCodes:
    """One matrix of all experts of a layer, quantised per output channel."""

    codes: Tensor  # [E, M, N] int8, -2^(b-1) .. 2^(b-1) - 1
    scales: Tensor  # [E, 1, N] float16
    bits: int

    @property
    def stored_bytes(self) -> int:
        """Codes at their width and the scales."""
        return self.codes.numel() * self.bits // 8 + self.scales.nbytes


def scales_for(weights: Tensor, bits: int, divisor: str = CLIPPING) -> Tensor:
    """FP16 scales [E, 1, N] of weights [E, M, N].

    Raises:
        ValueError: neither 4 nor 8 bits, or no such divisor.
    """
    if bits not in BITS or divisor not in DIVISORS:
        raise ValueError(f"{bits} bits, divisor '{divisor}': give 4 or 8 bits and one of {', '.join(DIVISORS)}")
    steps = 2 ** (bits - 1) - (divisor == FULL_RANGE)
    absmax = weights.float().abs().amax(dim=-2, keepdim=True)  # [E, 1, N]
    return (absmax / steps).clamp_min(_SMALLEST_SCALE).half()


def quantize(weights: Tensor, bits: int, divisor: str = CLIPPING) -> ChannelCodes:
    """Round weights [E, M, N] to the nearest code of their output channel (ties to even).

    Raises:
        ValueError: neither 4 nor 8 bits, or no such divisor.
    """
    scales = scales_for(weights, bits, divisor)
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    codes = torch.round(weights.float() / scales.float()).clamp_(lowest, highest)
    return ChannelCodes(codes.to(torch.int8), scales, bits)


def dequantize(coded: ChannelCodes) -> Tensor:
    """Effective float32 weights [E, M, N]; exact, since an integer code times an FP16 scale fits float32."""
    return coded.codes.float() * coded.scales.float()


def clipped(weights: Tensor, coded: ChannelCodes) -> Tensor:
    """Which weights lie more than half a step above the highest code, [E, M, N] bool."""
    return weights.float() > (2 ** (coded.bits - 1) - 0.5) * coded.scales.float()
