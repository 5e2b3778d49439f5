"""BF16 weights beside their INT4 codes: what the codes do not say already (this project; DESIGN.md section 3).

The draft's codes and scales lie on the GPU. A code q and its scale s say that the weight is within r s of q s, so its sign is known
and its exponent is one of a few. r is 1/2 where codes are the nearest:

    |q| >= 2   (|q| - r) s .. (|q| + r) s spans two binades at most         1 bit, in the sign's place
    |q| = 1    s / 2 .. 3 s / 2 spans three                                 2 bits, one in the sign's place, one in the stream
    q = 0      below r s: the sign, and how many binades below              sign, 3 bits in the stream

With the seven bits of the mantissa every weight takes one byte, and those near zero a few bits more: 8.8 bits of 16 for Gaussian
weights rounded to nearest. Whatever this does not reproduce (zeros, subnormal numbers, Inf, NaN, codes that error compensation has
moved) is listed as it is, so that every pattern comes back bit for bit. GPTQ moves codes so often that r = 3/4 is
better: 1 to 2 % of the zoo's weights are listed beside its codes instead of 2 to 4 %, and 10.0 to 10.3 bits cross instead of 10.7 to
11.2 (`engine.bench_draft`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from specter_lab.compress.grid import Codes, round_to_nearest

STREAM_BITS = (3, 1)  # of |q| = 0 and 1; larger codes have none
EXCEPTION_BYTES = 4 + 2  # place and pattern
ROW_BYTES = 4 + 4  # where a row's stream begins, and its exceptions
NEAREST, MOVED = REACHES = (0.5, 0.75)  # r, of codes rounded to nearest, and of codes that error compensation has moved


@dataclass(frozen=True)
class Size:
    """Of many weights."""

    weights: int
    moved_bytes: int
    exceptions: int

    @property
    def bits(self) -> float:
        """Per weight, over the link."""
        return 8 * self.moved_bytes / self.weights


@dataclass(frozen=True)
class Residual:
    """R rows of n weights, given their codes and scales."""

    low: Tensor  # [R, n] uint8: mantissa, and above it the sign or a bit of the exponent
    stream: Tensor  # [S] uint8, rows one after the other, each from a whole byte on; a byte more than is used
    starts: Tensor  # [R] int32, byte of `stream` where a row begins
    places: Tensor  # [X] int64, flat places of exceptions
    patterns: Tensor  # [X] int16, their bits
    reach: float = NEAREST

    @property
    def nbytes(self) -> int:
        """What crosses the link."""
        return self.low.nbytes + self.stream.nbytes + ROW_BYTES * len(self.starts) + EXCEPTION_BYTES * len(self.places)


def size(parts: Iterable[Tensor]) -> Size:
    """What BF16 matrices [..., out, in] weigh on the link when their codes are rounded to nearest."""
    found = Size(0, 0, 0)
    for weights in parts:
        residual = encode(weights, round_to_nearest(weights, 4))
        found = Size(
            found.weights + weights.numel(),
            found.moved_bytes + residual.nbytes,
            found.exceptions + len(residual.places),
        )
    return found


def encode(weights: Tensor, codes: Codes, reach: float = NEAREST) -> Residual:
    """What BF16 `weights` are beyond their codes.

    Args:
        weights: [..., n] bfloat16.
        codes: of the same shape, on the same device.
        reach: one of REACHES; it decides how much is listed, not whether every bit comes back.

    Raises:
        ValueError: other dtype or shape.
    """
    if weights.dtype != torch.bfloat16 or weights.shape != codes.codes.shape:
        raise ValueError(f"weights are {weights.dtype} {tuple(weights.shape)}, codes {tuple(codes.codes.shape)}: bfloat16 of one shape is needed")  # fmt: skip
    q, nearest = _rows(codes, reach)
    bits = weights.reshape(q.shape).view(torch.int16).int() & 0xFFFF  # [R, n]
    exponent, mantissa, magnitude = (bits >> 7) & 0xFF, bits & 0x7F, q.abs()
    away = torch.where(q == 0, nearest - exponent, exponent - nearest)  # binades from the nearest to what is
    away = away.clamp(min=0)
    top = torch.where(q == 0, bits >> 15, away & 1)
    low = (top << 7 | mantissa).to(torch.uint8)
    value = torch.where(q == 0, away.clamp(max=7), (away >> 1) & 1)
    stream, starts = _to_stream(value, stream_bits(magnitude))
    flat = bits.flatten().to(torch.int16)
    found = Residual(low, stream, starts, flat[:0].long(), flat[:0], reach)
    places = (_patterns(found, codes).flatten() != flat).nonzero().flatten()
    return Residual(low, stream, starts, places, flat[places], reach)


def decode(residual: Residual, codes: Codes) -> Tensor:
    """The weights that were encoded, bit for bit: [..., n] bfloat16. The reference of `engine.kernels.residual`."""
    patterns = _patterns(residual, codes).flatten()
    patterns[residual.places] = residual.patterns
    return patterns.view(torch.bfloat16).view(codes.codes.shape)


def stream_bits(magnitude: Tensor) -> Tensor:
    """Bits in the stream by |q|."""
    return torch.where(magnitude == 0, STREAM_BITS[0], torch.where(magnitude == 1, STREAM_BITS[1], 0))


def _rows(codes: Codes, reach: float) -> tuple[Tensor, Tensor]:
    """Codes [R, n] int32, and the exponent nearest to zero (q = 0: the largest) that a weight of that code should have."""
    q = codes.codes.flatten(0, -2).int()
    scales = codes.scales.flatten(0, -2).float().repeat_interleave(codes.group, dim=-1)  # [R, n]
    edge = torch.where(q == 0, reach, q.abs() - reach) * scales  # exact: a few quarters times an FP16 number
    return q, (edge.view(torch.int32) >> 23) & 0xFF


def _patterns(residual: Residual, codes: Codes) -> Tensor:
    """[R, n] int16 without the exceptions."""
    q, nearest = _rows(codes, residual.reach)
    low, magnitude = residual.low.int(), q.abs()
    value = _from_stream(residual, stream_bits(magnitude))
    top = low >> 7
    away = torch.where(q == 0, -value, torch.where(magnitude == 1, value << 1, 0) | top)
    sign = torch.where(q == 0, top, (q < 0).int())
    return (sign << 15 | ((nearest + away) & 0xFF) << 7 | low & 0x7F).to(torch.int16)


def _to_stream(value: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Values [R, n] of `count` bits each, low bits first -> (bytes, where rows begin)."""
    row_bytes = (count.sum(dim=1) + 7) // 8
    starts = row_bytes.cumsum(0) - row_bytes
    place = 8 * starts[:, None] + count.cumsum(1) - count  # [R, n] first bit of each
    bits = torch.zeros(8 * (int(row_bytes.sum()) + 1), dtype=torch.uint8, device=value.device)
    for bit in range(max(STREAM_BITS)):
        there = count > bit
        bits[place[there] + bit] = ((value[there] >> bit) & 1).to(torch.uint8)
    packed = (bits.view(-1, 8).int() << torch.arange(8, device=value.device)).sum(dim=1).to(torch.uint8)
    return packed, starts.int()


def _from_stream(residual: Residual, count: Tensor) -> Tensor:
    """The values [R, n] again."""
    place = 8 * residual.starts[:, None].long() + count.cumsum(1) - count
    byte, shift = (place >> 3).clamp(max=len(residual.stream) - 2), place & 7
    pair = residual.stream[byte].int() | residual.stream[byte + 1].int() << 8
    return (pair >> shift) & ((1 << count) - 1)
