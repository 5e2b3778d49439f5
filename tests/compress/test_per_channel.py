"""Per-channel quantisation, and every bit trick over every code at every place."""

import pytest
import torch

from specter_lab.compress import i2f, per_channel
from specter_lab.compress.per_channel import CLIPPING, DIVISORS, FULL_RANGE, dequantize, quantize


@pytest.fixture
def weights():
    return torch.randn(3, 64, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", per_channel.BITS)
@pytest.mark.parametrize("divisor", DIVISORS)
def test_shapes_range_and_error(weights, bits, divisor):
    coded = quantize(weights, bits, divisor)
    assert coded.codes.shape == weights.shape and coded.scales.shape == (3, 1, 40)
    assert coded.codes.dtype == torch.int8 and coded.scales.dtype == torch.float16
    lowest = -(2 ** (bits - 1)) + (divisor == FULL_RANGE)
    assert coded.codes.min() >= lowest and coded.codes.max() <= 2 ** (bits - 1) - 1
    error = (dequantize(coded) - weights).abs() / coded.scales.float()
    cut = per_channel.clipped(weights, coded)
    assert error[~cut].max() <= 0.5001
    assert error[cut].max() <= 1.07 if divisor == CLIPPING else not cut.any()  # FP16 moves a scale by 2^-11
    assert coded.stored_bytes == weights.numel() * bits // 8 + 3 * 40 * 2


def test_only_positive_extremes_are_cut(weights):
    coded = quantize(weights, 4)
    cut = per_channel.clipped(weights, coded)
    assert cut.any() and (coded.codes[cut] == 7).all()
    extreme = weights.abs() == weights.abs().amax(1, keepdim=True)
    assert (coded.codes[extreme & (weights < 0)] == -8).all()


def test_a_channel_of_zeros_stays_zero():
    coded = quantize(torch.zeros(1, 8, 4), 8)
    assert not dequantize(coded).any() and coded.scales.isfinite().all()


def test_unknown_bits_or_divisor(weights):
    with pytest.raises(ValueError, match="4 or 8"):
        quantize(weights, 3)
    with pytest.raises(ValueError, match="divisor"):
        quantize(weights, 4, "absmax")


def test_int8_every_code_at_every_byte():
    codes = torch.arange(-128, 128, dtype=torch.int8)
    for place in range(4):
        for other in (-128, -1, 127):
            word = torch.full((256, 4), other, dtype=torch.int8)
            word[:, place] = codes
            packed = i2f.pack_int8(word)
            for found in (i2f.int8_to_fp16(packed), i2f.int8_to_bf16(packed)):
                assert torch.equal(found.to(torch.int8), word) and torch.equal(found.float(), word.float())


def all_half_words():
    """Words whose one half takes every value while the other holds one nibble throughout."""
    half = torch.arange(2**16)
    words = [half | (n * 0x1111) << 16 for n in range(16)] + [half << 16 | n * 0x1111 for n in range(16)]
    words = torch.cat(words)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_int4_every_half_word(dtype):
    words = all_half_words()
    codes = i2f.unpack_int4(words[:, None])  # [W, 8]
    assert torch.equal(i2f.pack_int4(codes)[:, 0], words)
    found = i2f.int4_to_half(words[:, None], dtype)
    assert found.dtype == dtype and torch.equal(found.float(), codes.float())


def test_int4_layout_is_the_papers():
    codes = torch.arange(8, dtype=torch.int8)[None] - 8  # element e is stored as nibble e
    assert i2f.pack_int4(codes).item() == 0x75316420  # from the lowest nibble: 0, 2, 4, 6, 1, 3, 5, 7


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        i2f.int4_to_half(torch.zeros(1, 1, dtype=torch.int32), torch.float32)
