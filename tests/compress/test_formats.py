"""Grid, GPTQ words and INT4 bytes: every code of every width survives, and rounding errs as little as it can."""

import pytest
import torch

from specter_lab.compress import gptq_format, grid, int4, rtn
from specter_lab.errors import UserError
from specter_lab.models.experts import ExpertBank

WIDTHS = grid.BITS


def all_codes(bits, out_features=64, in_features=256):
    """Codes [1, out, in] in which every code stands at every position of a run of 32."""
    count = 2**bits
    row = torch.arange(in_features)
    codes = (row[None, :] + row[:out_features, None] * 7 + (row[:out_features, None] // count)) % count - count // 2
    scales = torch.rand(1, out_features, in_features // 128, generator=torch.Generator().manual_seed(0)) + 0.5
    return grid.Codes(codes[None].to(torch.int8), scales.half(), bits)


@pytest.mark.parametrize("bits", WIDTHS)
def test_words_hold_every_code_at_every_position(bits):
    values = torch.arange(2**bits)[None, :].expand(96, -1)  # column c holds code c only
    mixed = torch.randint(0, 2**bits, (96, 40), generator=torch.Generator().manual_seed(bits))
    for codes in (values, mixed):
        words = gptq_format.pack_words(codes, bits)
        assert words.dtype == torch.int32 and words.shape == (96 * bits // 32, codes.shape[1])
        assert torch.equal(gptq_format.unpack_words(words, bits), codes)


def test_word_layout_is_the_published_one():
    """3 bits: code 10 has two bits in word 0 and one in word 1 (AutoGPTQ's layout); 4 bits: eight to a word."""
    codes = torch.zeros(32, 1, dtype=torch.int64)
    codes[10] = 0b101
    assert gptq_format.pack_words(codes, 3).flatten().tolist() == [0b01 << 30, 0b1, 0]
    assert gptq_format.pack_words(torch.arange(32)[:, None] % 16, 4)[0].item() == 0x76543210


@pytest.mark.parametrize("bits", WIDTHS)
def test_gptq_tensors_give_the_effective_weights_back(bits):
    coded = all_codes(bits)
    tensors = gptq_format.to_tensors(coded, 0)
    assert tuple(tensors) == gptq_format.TENSORS
    assert torch.equal(gptq_format.dequantize(tensors, gptq_format.FORMAT_V1), grid.dequantize(coded)[0])


def test_version_2_zero_points_and_reordered_groups():
    """Asymmetric, act-order files, as others write them: weight = (code - zero of the input's group) x its scale."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (64, 32), generator=generator)  # [in, out]
    zeros = torch.randint(0, 16, (2, 32), generator=generator)
    scales = torch.rand(2, 32, generator=generator).half()
    group = torch.randint(0, 2, (64,), generator=generator)
    tensors = {
        "qweight": gptq_format.pack_words(codes, 4),
        "qzeros": gptq_format.pack_words(zeros.t(), 4).t().contiguous(),
        "scales": scales,
        "g_idx": group.to(torch.int32),
    }
    expected = torch.stack([(codes[i] - zeros[group[i]]) * scales[group[i]].float() for i in range(64)], dim=1)
    assert torch.equal(gptq_format.dequantize(tensors, gptq_format.FORMAT_V2), expected)


def test_int4_bytes_hold_every_pair_of_codes():
    pairs = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8)  # [256, 2]
    packed = int4.pack(pairs)
    assert packed.dtype == torch.uint8 and len(packed.unique()) == 256
    assert torch.equal(int4.unpack(packed), pairs)
    assert int4.pack(torch.tensor([-8, 7], dtype=torch.int8)).item() == 0xF0  # even input in the low nibble


def random_bank(experts=3, hidden=256, width=32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((experts, width, hidden), (experts, width, hidden), (experts, hidden, width))
    return ExpertBank(5, *(0.02 * torch.randn(*shape, generator=generator) for shape in shapes))


def test_int4_layout_stores_the_codes_of_the_grid():
    bank = random_bank()
    packed, coded = int4.quantize_bank(bank), rtn.quantize_bank(bank, 4)
    assert packed.layer == 5 and packed.gate.packed.shape == (3, 32, 128) and packed.gate.scales.shape == (3, 32, 2)
    assert packed.down.packed.shape == (3, 256, 16) and packed.down.scales.shape == (3, 256, 1)
    effective = int4.dequantize_bank(packed)
    for projection in ("gate", "up", "down"):
        assert torch.equal(getattr(int4.unpack_bank(packed), projection).codes, getattr(coded, projection).codes)
        assert torch.equal(getattr(effective, projection), grid.dequantize(getattr(coded, projection)))
    with pytest.raises(ValueError, match="8 bits"):
        int4.pack_bank(rtn.quantize_bank(bank, 8))


@pytest.mark.parametrize("bits", WIDTHS)
def test_rounding_errs_by_half_a_step_at_most(bits):
    """And by what rounding the scale itself to FP16 adds to the outermost code."""
    weights = random_bank().gate
    coded = grid.round_to_nearest(weights, bits)
    steps = coded.scales.float().repeat_interleave(coded.group, dim=-1)
    bound = 0.5 + 2 ** (bits - 1) * 2**-11
    assert ((grid.dequantize(coded) - weights).abs() <= steps * bound).all()
    assert (coded.codes.min().item(), coded.codes.max().item()) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert len(coded.codes.unique()) == 2**bits


def test_more_bits_err_less():
    weights = random_bank().gate
    errors = [(grid.dequantize(grid.round_to_nearest(weights, bits)) - weights).norm() for bits in WIDTHS]
    assert errors == sorted(errors, reverse=True)


def test_groups():
    assert grid.group_of(32) == 32 and grid.group_of(256) == 128 and grid.group_of(128) == 128
    with pytest.raises(UserError, match="rows of 192"):
        grid.group_of(192)


def test_an_all_zero_group_stays_zero():
    coded = grid.round_to_nearest(torch.zeros(1, 2, 128), 4)
    assert torch.equal(grid.dequantize(coded), torch.zeros(1, 2, 128))
