"""Decoding with trees: the target's text greedily, the target's law when sampled, one pass equal to every branch alone."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from specter_lab.errors import UserError
from specter_lab.measure import tree_decode as module
from specter_lab.measure.distribution import continuation_index, continuation_law, goodness_of_fit, with_vocabulary
from specter_lab.measure.prefix import prefill, read
from specter_lab.measure.sampling import sample
from specter_lab.measure.speculate import plain_decode, speculative_decode
from specter_lab.measure.tree import Node, TreeShape, follow, try_in_turn, without
from specter_lab.measure.tree_beliefs import Sharpened
from specter_lab.measure.tree_decode import Grown, grow, read_nodes, rounds_on, tree_decode
from specter_lab.models.experts import read_banks, with_experts

P, N = 8, 20
SHAPES = {
    "chain": TreeShape(5, width=1), "tree": TreeShape(7), "wide": TreeShape(7, together=0.0),
    "expert-aware": TreeShape(7, belief=Sharpened(0.02), price=0.3),
}  # fmt: skip


@pytest.fixture
def prompts(make_tokens):
    return torch.stack(make_tokens((P,) * 3).ids)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_greedy_text_is_the_targets(model, draft, prompts, shape):
    decoded = tree_decode(model, draft, prompts, new_tokens=N, shape=shape)
    assert torch.equal(decoded.tokens, plain_decode(model, prompts, new_tokens=N).tokens)
    rounds = [one for of_request in decoded.rounds for one in of_request]
    assert all(one.accepted <= one.nodes <= shape.nodes for one in rounds)
    assert 0 < np.mean([one.accepted for one in rounds]) < shape.nodes, "the draft is neither useless nor perfect"


def test_width_one_is_the_chain(model, draft, prompts):
    """The same rounds as `speculative_decode`: accepted tokens, experts needed, experts predicted."""
    decoded = tree_decode(model, draft, prompts, new_tokens=N, shape=SHAPES["chain"])
    chain = speculative_decode(model, draft, prompts, new_tokens=N, depth=SHAPES["chain"].nodes).rounds
    experts = np.arange(chain.needed.shape[2])
    for request, rounds in enumerate(decoded.rounds):
        mine = chain.of(np.array([request]))
        assert [one.accepted for one in rounds] == mine.accepted.tolist()
        for one, needed, predicted in zip(rounds, mine.needed, mine.predicted):
            read_by_draft = np.concatenate([step.indices for step in one.steps])
            np.testing.assert_array_equal((one.target[..., None] == experts).any(axis=(0, 2)), needed)
            np.testing.assert_array_equal((read_by_draft[..., None] == experts).any(axis=(0, 2)), predicted)


def test_one_pass_equals_every_branch_alone(model, draft, prompts):
    """Rows of different lengths and trees of different sizes beside each other."""
    with torch.inference_mode():
        prefix = prefill(model, prompts)
        prefix.forget(torch.tensor([2, 1, 4]))
        grown = [Grown(Node(int(token))) for token in prompts[:, -1]]
        grow(draft, copy.deepcopy(prefix), grown, TreeShape(7), 0.0, torch.Generator())
        grown[1].nodes = grown[1].nodes[:3]  # best first, so parents are still there
        alone, reading = copy.deepcopy(prefix), [[tree.root, *tree.nodes] for tree in grown]
        logits, routing = read_nodes(model, copy.deepcopy(prefix), prefix.cache.get_seq_length(), reading, {})
        rows = iter(zip(logits, routing.indices))
        for row, nodes in enumerate(reading):
            for node in nodes:
                path = torch.tensor([[above.token for above in node.path()]])
                branch, used = read(model, alone.rows(torch.tensor([row])), path)
                together, experts = next(rows)
                torch.testing.assert_close(together, branch[0, -1], atol=2e-4, rtol=1e-3)
                assert torch.equal(experts.sort().values, used.indices[-1].sort().values)
        assert next(rows, None) is None


def test_the_prefix_keeps_the_accepted_path(qwen, prompts):
    """What comes after some rounds is what a fresh prefix would give: rounds accept different paths."""
    decoded = tree_decode(qwen, qwen, prompts, new_tokens=N, shape=TreeShape(6))
    text = torch.cat([prompts, decoded.tokens], dim=1)
    best = qwen(text).logits[:, P - 1 : -1].argmax(dim=-1)
    assert torch.equal(best, decoded.tokens)


def test_nodes_of_a_step_and_what_stays_of_them(model, draft, prompts):
    decoded = tree_decode(model, draft, prompts, new_tokens=N, shape=SHAPES["wide"])
    rounds = [one for of_request in decoded.rounds for one in of_request]
    assert all(one.steps[0].kept.tolist() == [True] for one in rounds)  # the root
    assert any(len(step.kept) > 1 for one in rounds for step in one.steps)
    lazy = tree_decode(model, draft, prompts, new_tokens=N, shape=replace(SHAPES["wide"], together=1.0))
    assert all(len(step.kept) == 1 for of_request in lazy.rounds for one in of_request for step in one.steps)
    steps = [np.mean([len(r.steps) for of in each.rounds for r in of]) for each in (decoded, lazy)]
    assert steps[0] < steps[1]


def test_rounds_on_the_greedy_text_are_those_of_decoding(model, draft, prompts):
    decoded = tree_decode(model, draft, prompts, new_tokens=N, shape=SHAPES["tree"])
    along = rounds_on(model, draft, prompts, decoded.tokens, shape=SHAPES["tree"])
    for mine, theirs in zip(along, decoded.rounds, strict=True):
        assert [one.accepted for one in mine] == [one.accepted for one in theirs]
        for one, other in zip(mine, theirs):
            np.testing.assert_array_equal(np.sort(one.target), np.sort(other.target))


def test_rounds_on_a_text_stay_on_it(qwen, prompts, make_tokens):
    """A text that the target would not write: rounds begin on it all the same, and cover it."""
    text = torch.stack(make_tokens((N,) * len(prompts), seed=1).ids)
    for rounds in rounds_on(qwen, qwen, prompts, text, shape=SHAPES["chain"], temperature=1.0):
        committed = np.cumsum([0, *(one.accepted + 1 for one in rounds)])
        assert committed[-2] < N <= committed[-1]


V, LENGTH = 5, 3
TOKENS = torch.tensor([3, 11, 29, 40, 63])
PROMPT = torch.tensor([0, 4, 2, 2, 1, 3])


@pytest.fixture(scope="module")
def pair(qwen):
    """Target and a draft whose experts are another's, both with five tokens."""
    banks = [replace(b, gate=b.gate.roll(1, 0), up=b.up.roll(1, 0), down=b.down.roll(1, 0)) for b in read_banks(qwen)]
    return tuple(with_vocabulary(m, TOKENS) for m in (qwen, with_experts(qwen, banks)))


def always_first(tokens, q, p, generator):
    """Wrong on purpose: the first candidate is always kept."""
    return (0, tokens[0]) if tokens else (None, int(sample(p[None], generator)))


def no_residual(tokens, q, p, generator):
    """Wrong on purpose: a rejection leaves p as it was, not what q left over of it."""
    for place, token in enumerate(tokens):
        if torch.rand((), generator=generator, dtype=p.dtype) * q[token] < p[token]:
            return place, token
        q = without(q, token)
    return None, int(sample(p[None], generator))


def nodes_alone(root, nodes, laws, rule, generator):
    """Wrong on purpose: candidates that did not become nodes are not tried."""
    for node in (root, *nodes):
        node.candidates = [candidate for candidate in node.candidates if candidate in nodes]
    return follow(root, nodes, laws, rule, generator)


def fit(pair, shape, rule=try_in_turn, samples=2000):
    target, draft = pair
    law = continuation_law(target, PROMPT, LENGTH, 1.0)
    tokens = tree_decode(
        target, draft, PROMPT.expand(samples, -1), new_tokens=LENGTH, shape=shape, temperature=1.0, rule=rule
    ).tokens
    return goodness_of_fit(np.bincount(continuation_index(tokens, V), minlength=V**LENGTH), law)


SAMPLED = {"chain": TreeShape(2, 1), "tree": TreeShape(3, 3), "expert-aware": TreeShape(4, 3, price=0.4)}


@pytest.mark.parametrize("shape", SAMPLED.values(), ids=SAMPLED)
def test_sampled_text_follows_the_targets_law(pair, shape):
    """Also where pruning has looked at a node's own token and experts."""
    found = fit(pair, shape)
    assert found.p_value > 0.01 and found.cells > 20
    assert found.total_variation_at_most < 0.1


@pytest.mark.parametrize("rule", [always_first, no_residual])
def test_wrong_rules_fail(pair, rule):
    assert fit(pair, SAMPLED["tree"], rule).p_value < 1e-6


def test_pruning_by_a_nodes_own_token_bends_the_law_where_only_nodes_are_tried(pair, monkeypatch):
    monkeypatch.setattr(module, "follow", nodes_alone)
    assert fit(pair, SAMPLED["expert-aware"]).p_value < 1e-6


def test_bad_input_is_one_sentence(qwen, prompts):
    with pytest.raises(UserError, match="drafts nothing: give 1 or more"):
        tree_decode(qwen, qwen, prompts, new_tokens=N, shape=TreeShape(0))
    with pytest.raises(UserError, match="positions"):
        tree_decode(qwen, qwen, prompts, new_tokens=2048, shape=TreeShape(4))
