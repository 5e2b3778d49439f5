"""Integers to floating point without the conversion instruction (I2F): the paper's bit tricks and layouts, in torch.

A code q is stored unsigned, u = q + 2^(b-1). Put into the low mantissa bits of a power of two whose last bit counts
one, u *is* the number: FP16 0x6400 | u = 1024 + u for u < 1024, BF16 0x4300 | u = 128 + u for u < 128 (so int4 only),
FP32 0x4B000000 | u = 2^23 + u. One subtraction takes the power of two and the offset back out (Elephants, section on
dequantisation; Kim et al., arXiv 2211.10017). All of it works on 32-bit words, several codes at a time.

The kernels (`engine/kernels/channel_gemm.py`) do the same in PTX; here every step can be checked over all codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT4_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble p of a word holds element INT4_ORDER[p]
FP16_MAGIC, BF16_MAGIC, FP32_MAGIC = 0x6400, 0x4300, 0x4B000000
FP16_BASE, BF16_BASE, FP32_BASE = 1024, 128, 2**23  # what a zero under the magic number is worth
_LOW_NIBBLES, _HALF = 0x000F000F, 0xFFFF


def offset_of(bits: int) -> int:
    """What is added to a code to make it unsigned."""
    return 2 ** (bits - 1)


def pack_int8(codes: Tensor) -> Tensor:
    """[..., 4 w] int8 codes -> [..., w] int32 words of unsigned bytes, the first in the lowest."""
    return (codes.to(torch.int16) + offset_of(8)).to(torch.uint8).contiguous().view(torch.int32)


def pack_int4(codes: Tensor) -> Tensor:
    """[..., 8 w] int8 codes -8..7 -> [..., w] int32 words, nibbles in INT4_ORDER from the lowest.

    So the two nibbles that one mask takes out, four places apart, are neighbours.
    """
    nibbles = (codes.to(torch.int64) + offset_of(4)).unflatten(-1, (-1, 8))[..., list(INT4_ORDER)]  # [..., w, 8]
    words = (nibbles << (4 * torch.arange(8, device=codes.device))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_int4(words: Tensor) -> Tensor:
    """The inverse of `pack_int4`, by plain shifts."""
    nibbles = (words.to(torch.int64)[..., None] >> (4 * torch.arange(8, device=words.device))) & 0xF  # by position
    return (nibbles[..., _inverse(INT4_ORDER)].flatten(-2) - offset_of(4)).to(torch.int8)


def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _halves(words: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., w] int64 holding 32 bits -> [..., w, 2] numbers of 16 bits, the low half first."""
    pair = torch.stack((words & _HALF, (words >> 16) & _HALF), dim=-1)
    return torch.where(pair >= 2**15, pair - 2**16, pair).to(torch.int16).view(dtype)


def int8_to_fp16(words: Tensor) -> Tensor:
    """[..., w] words of four bytes -> [..., 4 w] float16 codes: two byte permutations, two subtractions of 1152."""
    bits = words.to(torch.int64) & 0xFFFFFFFF
    magic = FP16_MAGIC | FP16_MAGIC << 16
    low = (bits & 0xFF) | (bits >> 8 & 0xFF) << 16 | magic  # bytes 0 and 1
    high = (bits >> 16 & 0xFF) | (bits >> 24 & 0xFF) << 16 | magic
    raised = torch.cat((_halves(low, torch.float16), _halves(high, torch.float16)), dim=-1)  # [..., w, 4]
    return (raised - (FP16_BASE + offset_of(8))).flatten(-2)


def int8_to_bf16(words: Tensor) -> Tensor:
    """[..., w] words of four bytes -> [..., 4 w] bfloat16 codes, by way of FP32: BF16 has 7 mantissa bits, not 8."""
    bytes_ = words.contiguous().view(torch.uint8).to(torch.int32)  # [..., 4 w]
    raised = (bytes_ | FP32_MAGIC).view(torch.float32)
    exact = raised - (FP32_BASE + offset_of(8))  # -128..127
    return (exact.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)  # the lower half is zero


def int4_to_half(words: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., w] words of eight nibbles -> [..., 8 w] float16 or bfloat16 codes: four masks, four subtractions.

    Raises:
        ValueError: another type.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"int4 codes become float16 or bfloat16, not {dtype}")
    magic, base = (FP16_MAGIC, FP16_BASE) if dtype == torch.float16 else (BF16_MAGIC, BF16_BASE)
    bits = words.to(torch.int64) & 0xFFFFFFFF
    pairs = [
        _halves((bits >> 4 * s & _LOW_NIBBLES) | magic | magic << 16, dtype) for s in range(4)
    ]  # elements 2s, 2s + 1
    return (torch.cat(pairs, dim=-1) - (base + offset_of(4))).flatten(-2)
