"""Weights beside their codes: every pattern comes back, and most of them cost a byte."""

import pytest
import torch

from specter_lab.compress.grid import Codes, round_to_nearest
from specter_lab.compress.residual import REACHES, decode, encode


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("reach", REACHES)
def test_every_pattern_beside_every_code(reach):
    """All 65,536 patterns, NaN payloads and subnormal numbers included, each beside each of the sixteen codes."""
    patterns = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    rows = patterns.view(512, 128).repeat(16, 1)[None]  # [1, 16 * 512, 128]
    q = torch.arange(-8, 8).repeat_interleave(512)[:, None].expand(-1, 128).to(torch.int8)[None]
    codes = Codes(q.contiguous(), torch.full((1, 16 * 512, 1), 0.01).half(), 4)
    assert same_bits(decode(encode(rows, codes, reach), codes), rows)


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 3, 32), (1, 5, 384), (3, 7, 1408)])
@pytest.mark.parametrize("scale", [1e-38, 0.02, 1.0, 1e30])
def test_odd_shapes_and_sizes(shape, scale):
    weights = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale).bfloat16()
    codes = round_to_nearest(weights.clamp(-6e4, 6e4), 4)
    assert same_bits(decode(encode(weights, codes), codes), weights)


def test_gaussian_weights_take_less_than_nine_bits():
    weights = (torch.randn(1, 256, 2048, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    residual = encode(weights, round_to_nearest(weights, 4))
    assert 8.7 < 8 * residual.nbytes / weights.numel() < 8.9
    assert len(residual.places) < 2e-3 * weights.numel()


def test_what_cannot_be_encoded():
    weights = torch.randn(1, 4, 128)
    with pytest.raises(ValueError, match="bfloat16 of one shape"):
        encode(weights, round_to_nearest(weights, 4))
