import numpy as np
import pytest
import torch

from specter_lab.measure import parity
from specter_lab.measure.parity import greedy_parity, repeated_share, width_effect
from specter_lab.measure.speculate import plain_decode

N, K = 40, 5


@pytest.fixture
def prompts(make_tokens):
    return torch.stack(make_tokens((12, 12)).ids)  # [2, 12]


def test_float32_parity(model, draft, prompts):
    for found in greedy_parity(model, draft, prompts, new_tokens=N, depth=K):
        assert (found.first_divergence, found.margin, found.equal_tokens) == (None, None, N)
        assert 1 < found.tokens_per_round < K + 1


def test_a_prompt_is_found_the_same_alone_and_beside_others(model, draft, prompts):
    beside = greedy_parity(model, draft, prompts, new_tokens=N, depth=K)
    alone = [greedy_parity(model, draft, prompt[None], new_tokens=N, depth=K)[0] for prompt in prompts]
    assert beside == alone and alone[0] != alone[1]


def test_first_divergence_and_its_margin_are_found(qwen, prompts, monkeypatch):
    """Speculative decoding that breaks two tokens of one text: the first is reported, with plain decoding's margin there."""
    plain = plain_decode(qwen, prompts, new_tokens=N)
    original = parity.speculative_decode

    def broken(*args, **options):
        decoded = original(*args, **options)
        decoded.tokens[1, [7, 20]] += 1
        return decoded

    monkeypatch.setattr(parity, "speculative_decode", broken)
    whole, parted = greedy_parity(qwen, qwen, prompts, new_tokens=N, depth=K)
    assert (whole.first_divergence, whole.equal_tokens) == (None, N)
    assert (parted.first_divergence, parted.equal_tokens) == (7, 7)
    assert parted.margin == plain.margins[1, 7]


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
