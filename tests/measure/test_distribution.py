from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from specter_lab.measure.distribution import (
    RULES,
    continuation_index,
    continuation_law,
    goodness_of_fit,
    with_vocabulary,
)  # fmt: skip
from specter_lab.measure.speculate import speculative_decode
from specter_lab.models.experts import read_banks, with_experts

V, LENGTH = 5, 3
TOKENS = torch.tensor([3, 11, 29, 40, 63])
PROMPT = torch.tensor([0, 4, 2, 2, 1, 3])


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, initializer_range=0.5,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def pair(tiny):
    """Target and a draft whose experts are another's, both with five tokens."""
    shifted = [replace(b, gate=b.gate.roll(1, 0), up=b.up.roll(1, 0), down=b.down.roll(1, 0)) for b in read_banks(tiny)]
    return with_vocabulary(tiny, TOKENS), with_vocabulary(with_experts(tiny, shifted), TOKENS)


def fit(pair, rule, depth=2, samples=6000):
    target, draft = pair
    law = continuation_law(target, PROMPT, LENGTH, 1.0)
    prompts = PROMPT.expand(samples, -1)
    tokens = speculative_decode(
        target, draft, prompts, new_tokens=LENGTH, depth=depth, temperature=1.0, rule=RULES[rule]
    ).tokens
    return goodness_of_fit(np.bincount(continuation_index(tokens, V), minlength=V**LENGTH), law)


def test_a_small_vocabulary_is_the_same_model(tiny, pair):
    small = pair[0]
    assert small.model.layers[1].mlp.experts.down_proj is tiny.model.layers[1].mlp.experts.down_proj
    assert (small.config.vocab_size, tiny.config.vocab_size) == (V, 64)
    torch.testing.assert_close(small(PROMPT[None]).logits, tiny(TOKENS[PROMPT][None]).logits[..., TOKENS])


def test_law_equals_step_by_step_probabilities(pair):
    law = continuation_law(pair[0], PROMPT, LENGTH, 0.7)
    assert law.shape == (V**LENGTH,) and law.sum() == pytest.approx(1)
    for continuation in ([0, 0, 0], [1, 4, 2], [4, 4, 4]):
        text, probability = PROMPT, 1.0
        for token in continuation:
            probability *= torch.softmax(pair[0](text[None]).logits[0, -1] / 0.7, -1)[token].item()
            text = torch.cat([text, torch.tensor([token])])
        found = law[continuation_index(torch.tensor([continuation]), V)[0]]
        assert found == pytest.approx(probability, rel=1e-4)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_standard_rule_passes(pair, depth):
    found = fit(pair, "standard", depth)
    assert found.p_value > 0.01 and found.cells > 20
    assert found.total_variation_at_most < 0.06


@pytest.mark.parametrize("rule", ["always accept", "no residual"])
def test_wrong_rules_fail(pair, rule):
    assert fit(pair, rule).p_value < 1e-6


def test_chi_square_against_tables():
    law = np.full(11, 1 / 11)
    counts = np.full(11, 100)
    counts[0], counts[1] = 100 + 30, 100 - 30  # chi-square 18 with 10 degrees of freedom
    found = goodness_of_fit(counts, law)
    assert found.chi_square == pytest.approx(18)
    assert found.p_value == pytest.approx(0.0550, abs=1e-4)
    assert found.total_variation == pytest.approx(30 / 1100)


def test_p_values_of_a_perfect_sampler_are_uniform_and_the_bound_holds():
    generator = np.random.default_rng(0)
    law = generator.dirichlet(np.ones(40))
    fits = [goodness_of_fit(generator.multinomial(5000, law), law) for _ in range(200)]
    assert 0.4 < np.mean([f.p_value for f in fits]) < 0.6
    other = 0.9 * law + 0.1 * np.roll(law, 1)
    distance = np.abs(other - law).sum() / 2
    bounds = [goodness_of_fit(generator.multinomial(5000, other), law).total_variation_at_most for _ in range(50)]
    assert np.mean(np.array(bounds) > distance) >= 0.95


def test_the_bound_promises_no_more_than_the_sample_can_show():
    """Counts that fit better than chance: a bound of zero would say that no distance at all is left."""
    law = np.full(40, 1 / 40)
    for n in (400, 4000):
        least = np.sqrt(-2 * np.log(0.05) / n) / 2
        for shift in (0, 1, 2):  # chi-square of 0 and little more, where 40 are expected
            counts = np.full(40, n // 40) + np.tile([shift, -shift], 20)
            found = goodness_of_fit(counts, law)
            assert found.p_value > 0.9
            assert found.total_variation_at_most >= least - 1e-6
    assert goodness_of_fit(np.full(40, 100), law).total_variation_at_most == pytest.approx(least, rel=0.07)


def test_the_bound_holds_for_small_distances():
    generator = np.random.default_rng(1)
    law = np.full(40, 1 / 40)
    for step in (0.05, 0.1, 0.2):
        other = law * (1 + step * np.tile([1, -1], 20))
        bounds = [goodness_of_fit(generator.multinomial(4000, other), law).total_variation_at_most for _ in range(60)]
        assert np.mean(np.array(bounds) >= step / 2) >= 0.93  # 95 %, within the error of 60 draws


def test_rare_cells_are_merged():
    law = np.array([0.5, 0.4] + [0.001] * 100)
    found = goodness_of_fit(np.array([500, 400] + [1] * 100), law)
    assert (found.cells, found.chi_square) == (3, 0)
    found = goodness_of_fit(np.array([500, 497, 3]), np.array([0.5, 0.497, 0.003]))
    assert found.cells == 2  # the rare cell alone would be too small: it takes in the next
    with pytest.raises(ValueError, match="draw more"):
        goodness_of_fit(np.array([2, 1]), np.array([0.5, 0.5]))
