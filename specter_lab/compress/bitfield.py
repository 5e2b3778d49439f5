"""BF16 weights as bit fields (ZipMoE): sign and mantissa in one raw byte, exponents compressed without loss.

    BF16            s eeeeeeee mmmmmmm
    SM-chunk        s mmmmmmm             one byte per weight, raw: its bits are close to random
    E-chunks        eeeeeeee              one byte per weight, cut into K shards that are compressed one by one
    recovered       sign << 15 | exponent << 7 | mantissa

Signs and mantissas have nothing to give, exponents 5.4 of their 8 bits: 2.6 bits are left of trained or Gaussian weights.
Every pattern comes back as it was, NaN payloads, both zeros and subnormal numbers included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specter_lab.compiled import compiled
from specter_lab.compress.codecs import DAMAGE, Codec
from specter_lab.compress.recovery import recover
from specter_lab.errors import UserError

SHARDS = 3  # K in the paper
SHARD_STEP = 4096  # weights; shards begin at multiples of it


@dataclass(frozen=True)
class BitFields:
    """One weight tensor of n BF16 values, compressed."""

    shape: tuple[int, ...]
    sign_mantissa: np.ndarray  # [n] uint8
    shards: tuple[bytes, ...]  # K compressed pieces of the [n] exponents

    @property
    def stored_bytes(self) -> int:
        return self.sign_mantissa.nbytes + sum(map(len, self.shards))


def split(weight: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Sign-mantissa and exponent bytes of a BF16 tensor: two of [n] uint8.

    Raises:
        UserError: the tensor is not BF16; FP16 has its fields elsewhere, FP32 has more of them.
    """
    patterns = bit_patterns(weight)
    sign_mantissa, exponents = np.empty((2, len(patterns)), np.uint8)
    _split(patterns, sign_mantissa, exponents)
    return sign_mantissa, exponents


def bit_patterns(weight: Tensor) -> np.ndarray:
    """The [n] uint16 patterns of a BF16 tensor on the CPU, without a copy where it is contiguous.

    Raises:
        UserError: the tensor is not BF16.
    """
    if weight.dtype != torch.bfloat16:
        name = str(weight.dtype).removeprefix("torch.")
        raise UserError(f"the bit-field codec stores bfloat16 weights, these are {name}: convert the checkpoint to "
                        f"bfloat16 first, which changes {name} values unless they were bfloat16 once")  # fmt: skip
    return weight.detach().contiguous().view(torch.uint16).reshape(-1).numpy()


@compiled
def _split(patterns, sign_mantissa, exponents):
    for i in range(len(patterns)):
        pattern = patterns[i]
        exponents[i] = np.uint8((pattern >> np.uint16(7)) & np.uint16(0xFF))
        sign_mantissa[i] = np.uint8(((pattern >> np.uint16(8)) & np.uint16(0x80)) | (pattern & np.uint16(0x7F)))


@compiled
def sign_mantissa_of(patterns, out):
    """The first half of `split`, without memory of its own: [n] uint16 -> the first n of out, uint8.

    Raises:
        ValueError: out is shorter.
    """
    if len(out) < len(patterns):
        raise ValueError("fewer places than patterns")
    for i in range(len(patterns)):
        out[i] = np.uint8(((patterns[i] >> np.uint16(8)) & np.uint16(0x80)) | (patterns[i] & np.uint16(0x7F)))


def recover_reference(sign_mantissa: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """`recover` as the paper writes it, in NumPy: [n] uint16."""
    fields, exponent = sign_mantissa.astype(np.uint16), exponents.astype(np.uint16)
    return ((fields >> 7) << 15) | (exponent << 7) | (fields & 0x7F)


def shard_bounds(num_weights: int, shards: int) -> list[tuple[int, int]]:
    """First and last + 1 weight of every shard: K ranges, of equal length up to SHARD_STEP."""
    steps = -(-num_weights // SHARD_STEP)
    edges = [min(num_weights, SHARD_STEP * (steps * k // shards)) for k in range(shards)] + [num_weights]
    return list(zip(edges, edges[1:]))


def encode(weight: Tensor, codec: Codec, shards: int = SHARDS) -> BitFields:
    """Compress one BF16 tensor of any shape.

    Raises:
        UserError: the tensor is not BF16.
        ValueError: fewer than one shard.
    """
    if shards < 1:
        raise ValueError(f"exponents are cut into one shard or more, not {shards}")
    sign_mantissa, exponents = split(weight)
    pieces = [codec.compress(exponents[a:b].tobytes()) for a, b in shard_bounds(len(exponents), shards)]
    return BitFields(tuple(weight.shape), sign_mantissa, tuple(pieces))


def decode(fields: BitFields, codec: Codec) -> Tensor:
    """The tensor that was encoded, bit for bit, on the CPU.

    Raises:
        ValueError: as in `decode_part`.
    """
    out = torch.empty(fields.shape, dtype=torch.bfloat16)
    patterns = bit_patterns(out)
    for k in range(len(fields.shards)):
        decode_shard(fields.shards, k, fields.sign_mantissa, codec, patterns)
    return out


def decode_shard(shards: Sequence[bytes], k: int, sign_mantissa: np.ndarray, codec: Codec, out: np.ndarray) -> None:
    """Decompress shard k and recover its part of `out` [n] uint16, while the exponents are still in the cache.

    Raises:
        ValueError: as in `decode_part`.
    """
    first, last = shard_bounds(len(out), len(shards))[k]
    decode_part(shards[k], sign_mantissa[first:last], codec, out[first:last])


def decode_part(shard: bytes, sign_mantissa: np.ndarray, codec: Codec, out: np.ndarray) -> None:
    """The patterns of one shard: compressed exponents and [n] uint8 -> out [n] uint16, at once where the codec can.

    Raises:
        ValueError: the shard is damaged or does not hold as many exponents, or the lengths differ.
    """
    put_together(shard, exponents_alone(shard, len(out), codec), sign_mantissa, codec, out)


def exponents_alone(shard: bytes, num_weights: int, codec: Codec) -> np.ndarray | None:
    """The first half of `decode_part`, without the other field: [n] uint8; None where the codec recovers at once.

    Raises:
        ValueError: as in `exponents_of`.
    """
    return exponents_of(shard, num_weights, codec) if codec.recover is None else None


def put_together(
    shard: bytes, exponents: np.ndarray | None, sign_mantissa: np.ndarray, codec: Codec, out: np.ndarray
) -> None:
    """The second half of `decode_part`, from what `exponents_alone` found in the shard.

    Raises:
        ValueError: as in `decode_part`.
    """
    if exponents is None:
        codec.recover(shard, sign_mantissa, out)
    else:
        recover(sign_mantissa, exponents, out)


def exponents_of(shard: bytes, num_weights: int, codec: Codec) -> np.ndarray:
    """The exponents of one shard: [n] uint8.

    Raises:
        ValueError: the shard is damaged, or does not hold as many.
    """
    if num_weights == 0:
        return np.empty(0, np.uint8)
    try:
        exponents = np.frombuffer(codec.decompress(shard, num_weights), np.uint8)
    except DAMAGE as error:
        raise ValueError(f"a shard of {num_weights} exponents cannot be decompressed ({error})") from error
    if len(exponents) != num_weights:
        raise ValueError(f"a shard of {num_weights} exponents holds {len(exponents)}")
    return exponents


def field_entropies(weight: Tensor) -> dict[str, float]:
    """Entropy in bits per weight of the bit fields of a BF16 tensor, each by itself: sign, exponent, mantissa.

    Raises:
        UserError: the tensor is not BF16, or empty.
    """
    sign_mantissa, exponents = split(weight)
    if not len(exponents):
        raise UserError("an empty tensor has no entropy: give weights")
    fields = {"sign": sign_mantissa >> 7, "exponent": exponents, "mantissa": sign_mantissa & 0x7F}
    return {name: _entropy_bits(np.bincount(values)) for name, values in fields.items()}


def _entropy_bits(counts: np.ndarray) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum() + 0.0)
