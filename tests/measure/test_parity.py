import numpy as np
import pytest
import torch

from specter_lab.measure import parity
from specter_lab.measure.parity import greedy_parity, repeated_share, width_effect
from specter_lab.measure.speculate import plain_decode

N, K = 40, 5


@pytest.fixture
def prompt(make_tokens):
    return make_tokens((12,)).ids[0]


def test_float32_parity(model, draft, prompt):
    found = greedy_parity(model, draft, prompt, new_tokens=N, depth=K)
    assert (found.first_divergence, found.margin, found.equal_tokens) == (None, None, N)
    assert 1 < found.tokens_per_round < K + 1


def test_first_divergence_and_its_margin_are_found(qwen, prompt, monkeypatch):
    """Speculative decoding that breaks two tokens: the first is reported, with plain decoding's margin there."""
    plain = plain_decode(qwen, prompt[None], new_tokens=N)
    original = parity.speculative_decode

    def broken(*args, **options):
        decoded = original(*args, **options)
        decoded.tokens[0, [7, 20]] += 1
        return decoded

    monkeypatch.setattr(parity, "speculative_decode", broken)
    found = greedy_parity(qwen, qwen, prompt, new_tokens=N, depth=K)
    assert (found.first_divergence, found.equal_tokens) == (7, 7)
    assert found.margin == plain.margins[0, 7]


def test_repeated_share():
    assert repeated_share(list(range(50))) == 0
    loop = [1, 2, 3, 4, 5] * 10
    assert repeated_share(loop) == pytest.approx(1 - 5 / 43)


def test_width_effect_grows_as_precision_falls(make_tokens, qwen):
    text = make_tokens((40,)).ids[0]
    single, half = width_effect(qwen, text, K + 1), width_effect(qwen.to(torch.bfloat16), text, K + 1)
    qwen.float()
    for found in (single, half):
        assert found.difference.shape == found.margin.shape == found.flipped.shape == (39,)
        np.testing.assert_array_less(found.margin[found.flipped], 2.001 * found.difference[found.flipped])
    assert 0 < np.median(single.difference) < 1e-3 < np.median(half.difference)


def test_reading_one_by_one_twice_is_the_same(qwen, make_tokens):
    assert width_effect(qwen, make_tokens((10,)).ids[0], 1).difference.max() == 0
