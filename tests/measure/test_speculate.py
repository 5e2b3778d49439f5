import copy
import inspect

import numpy as np
import pytest
import torch

from specter_lab.errors import UserError
from specter_lab.measure import speculate
from specter_lab.measure.depths import greedy_rounds
from specter_lab.measure.draft import free_running_draft
from specter_lab.measure.speculate import plain_decode, speculative_decode
from specter_lab.models.routing import observe_routing
from tests.measure.conftest import build_model

P, N, K = 8, 24, 5


@pytest.fixture
def prompts(make_tokens):
    return torch.stack(make_tokens((P,) * 4).ids)


def used_by(model, ids):
    """Experts [S, L, E] bool of a plain forward pass over ids [S]."""
    seen = []
    with observe_routing(model, seen.append):
        model(ids[None])
    return torch.stack([torch.zeros_like(r.logits, dtype=torch.bool).scatter(1, r.indices, True) for r in seen], dim=1)


@pytest.mark.parametrize("depth", [1, K])
def test_greedy_output_is_the_targets(model, draft, prompts, depth):
    plain = plain_decode(model, prompts, new_tokens=N)
    decoded = speculative_decode(model, draft, prompts, new_tokens=N, depth=depth)
    assert torch.equal(decoded.tokens, plain.tokens)
    assert 0 < decoded.rounds.accepted.mean() < depth, "the draft is neither useless nor perfect"


def test_plain_decoding_equals_an_oracle_without_cache(qwen, prompts):
    plain = plain_decode(qwen, prompts, new_tokens=6)
    for row, prompt in enumerate(prompts):
        text = prompt
        for step in range(6):
            best = qwen(text[None]).logits[0, -1].topk(2)
            assert plain.tokens[row, step] == best.indices[0]
            assert plain.margins[row, step].item() == pytest.approx((best.values[0] - best.values[1]).item(), abs=1e-3)
            text = torch.cat([text, best.indices[:1]])


def test_a_draft_that_is_the_target_is_never_corrected(qwen, prompts):
    for temperature in (0.0, 1.0):
        rounds = speculative_decode(qwen, qwen, prompts, new_tokens=N, depth=K, temperature=temperature).rounds
        assert rounds.accepted.mean() > K - 0.05  # sampling compares p with q after rounding
        assert len(rounds.accepted) == 4 * np.ceil(N / (K + 1))


def test_rounds_account_for_every_token(model, draft, prompts):
    rounds = speculative_decode(model, draft, prompts, new_tokens=N, depth=K).rounds
    for request in range(4):
        mine = rounds.of(np.array([request]))
        committed = mine.accepted + 1
        np.testing.assert_array_equal(mine.position, P - 1 + np.concatenate([[0], committed.cumsum()[:-1]]))
        assert committed[:-1].sum() < N <= committed.sum()


def test_needed_experts_are_those_of_a_plain_pass_over_the_window(qwen, prompts):
    """The first window, drafted by the target itself: its tokens are known, so is what they route to."""
    decoded = speculative_decode(qwen, qwen, prompts, new_tokens=K + 1, depth=K)
    for row, prompt in enumerate(prompts):
        used = used_by(qwen, torch.cat([prompt, decoded.tokens[row, :K]]))[P - 1 :]  # [K + 1, L, E]
        np.testing.assert_array_equal(decoded.rounds.needed[row], used.any(dim=0))
        np.testing.assert_array_equal(decoded.rounds.predicted[row], used[:K].any(dim=0))


def test_side_by_side_equals_one_at_a_time(model, draft, prompts):
    together = speculative_decode(model, draft, prompts, new_tokens=N, depth=K)
    for row in range(len(prompts)):
        alone = speculative_decode(model, draft, prompts[row : row + 1], new_tokens=N, depth=K)
        assert torch.equal(together.tokens[row : row + 1], alone.tokens)
        mine = together.rounds.of(np.array([row]))
        np.testing.assert_array_equal(mine.accepted, alone.rounds.accepted)
        np.testing.assert_array_equal(mine.needed, alone.rounds.needed)


def test_sampling_depends_on_the_seed_alone(qwen, prompts):
    def tokens(seed):
        return speculative_decode(qwen, qwen, prompts, new_tokens=N, depth=K, temperature=1.0, seed=seed).tokens

    assert torch.equal(tokens(1), tokens(1)) and not torch.equal(tokens(1), tokens(2))


def test_the_decoder_reads_like_the_paper():
    body = inspect.getsource(speculate.speculative_decode).split('"""')[2].strip().splitlines()
    assert len(body) <= 30


def test_bad_input_is_one_sentence(qwen, prompts):
    other = copy.copy(qwen)
    other.config = copy.deepcopy(qwen.config)
    other.config.vocab_size = 32000
    with pytest.raises(UserError, match="the draft has a vocabulary of 32000 tokens, the target one of 2048"):
        speculative_decode(qwen, other, prompts, new_tokens=N, depth=K)
    with pytest.raises(UserError, match="need 2061 positions, the model has 2048: ask for 13 fewer new tokens"):
        speculative_decode(qwen, qwen, prompts, new_tokens=2048, depth=K)
    with pytest.raises(UserError, match="at least 2 tokens"):
        plain_decode(qwen, prompts[:, :1], new_tokens=N)


@pytest.mark.parametrize("depth", [0, -2])
def test_a_depth_that_drafts_nothing(qwen, prompts, make_tokens, origin, depth):
    said = f"a depth of {depth} drafts nothing: give 1 or more, or decode with the target alone"
    with pytest.raises(UserError, match=said):
        speculative_decode(qwen, qwen, prompts, new_tokens=N, depth=depth)
    with pytest.raises(UserError, match=said):
        greedy_rounds(qwen, qwen, prompts, new_tokens=N, depths=(4, depth))
    with pytest.raises(UserError, match=said):
        free_running_draft(qwen, qwen, make_tokens((P, P)), origin, origin, prefix_tokens=P, depth=depth)


@pytest.mark.parametrize("new_tokens", [0, -1])
def test_nothing_to_write(qwen, prompts, new_tokens):
    for decode in (plain_decode, lambda *a, **how: speculative_decode(*a[:1], *a, depth=K, **how)):
        with pytest.raises(UserError, match=f"{new_tokens} new tokens leave nothing to decode"):
            decode(qwen, prompts, new_tokens=new_tokens)


@pytest.mark.parametrize("other", ["phi-nano", "deepseek-nano"])
def test_a_draft_that_cannot_read_the_targets_cache(qwen, prompts, make_tokens, origin, other):
    stranger = build_model(other)
    with pytest.raises(UserError, match="the draft cannot continue from the target's keys and values"):
        speculative_decode(qwen, stranger, prompts, new_tokens=N, depth=K)
    with pytest.raises(UserError, match="the draft cannot continue"):
        free_running_draft(qwen, stranger, make_tokens((P, P)), origin, origin, prefix_tokens=P, depth=K)
