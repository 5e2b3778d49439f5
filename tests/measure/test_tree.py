"""Growing a tree and following it, by hand; and the exact rule against the law it has to give."""

import numpy as np
import pytest
import torch

from specter_lab.measure.sampling import sample
from specter_lab.measure.tree import Node, TreeShape, best_nodes, draw, follow, residual, to_read, try_in_turn, without
from specter_lab.measure.tree_beliefs import Coupled, Sharpened, as_drafted, fit_coupled, fit_sharpened

LAW = torch.zeros(8, dtype=torch.float64)


def node(parent, chance, experts=None, token=0, read=True):
    """A candidate of `parent`; its experts of one layer of eight, None: the draft has not read it."""
    made = Node(token, parent, parent.depth + 1 if parent else 0, chance)
    if read:
        made.law, made.experts = LAW, np.isin(np.arange(8), experts or [])[None]
    if parent:
        parent.candidates.append(made)
    return made


def test_the_best_nodes_come_first_whatever_their_depth():
    root = node(None, 1.0)
    a, b = node(root, 0.7), node(root, 0.3)
    c, d = node(a, 0.6), node(a, 0.1)
    e = node(c, 0.5, read=False)
    assert best_nodes(root, TreeShape(4)) == [a, c, e, b]
    assert best_nodes(root, TreeShape(9)) == [a, c, e, b, d]
    assert best_nodes(root, TreeShape(2)) == [a, c]


def test_a_sure_draft_grows_a_chain_and_width_one_always():
    root = node(None, 1.0)
    chain = [root]
    for _ in range(3):
        node(chain[-1], 0.97 * chain[-1].chance)
        node(chain[-1], 0.03 * chain[-1].chance)
        chain.append(chain[-1].candidates[0])
    assert best_nodes(root, TreeShape(3)) == chain[1:]


def test_a_node_has_to_be_worth_the_experts_it_brings_in_vain():
    root = node(None, 1.0, experts=[0, 1])
    cheap, dear = node(root, 0.4, experts=[0, 1]), node(root, 0.6, experts=[2, 3])
    below = node(dear, 0.5, experts=[2, 3])
    assert best_nodes(root, TreeShape(9)) == [dear, below, cheap]
    # 0.6 against price x 0.4 x 2 new experts; what is below it costs nothing more, but falls with it
    assert best_nodes(root, TreeShape(9, price=0.74)) == [dear, below, cheap]
    assert best_nodes(root, TreeShape(9, price=0.76)) == [cheap]
    # until it is read a node is taken to bring one expert per layer: 0.45 against price x 0.55
    unread = node(cheap, 0.45 * 0.8, read=False)
    assert unread in best_nodes(root, TreeShape(9, price=0.5))
    assert unread not in best_nodes(root, TreeShape(9, price=0.6))


def test_a_blind_price_takes_every_node_for_the_same():
    root = node(None, 1.0, experts=[0, 1])
    cheap, dear = node(root, 0.4, experts=[0, 1]), node(root, 0.6, experts=[2, 3])
    assert best_nodes(root, TreeShape(9, price=0.5, blind=1.0)) == [dear, cheap]
    assert best_nodes(root, TreeShape(9, price=0.5, blind=2.0)) == [dear]


def test_experts_that_a_better_node_brings_are_free():
    root = node(None, 1.0, experts=[0])
    first, second = node(root, 0.6, experts=[2, 3]), node(root, 0.3, experts=[2, 3])
    assert best_nodes(root, TreeShape(9, price=0.7)) == [first, second]
    first.experts[:] = False
    assert best_nodes(root, TreeShape(9, price=0.7)) == [first]  # 0.3 < 0.7 x 0.7 x 2


def test_what_the_draft_reads_next():
    root = node(None, 1.0)
    a, b, c = (node(root, chance, read=False) for chance in (0.5, 0.3, 0.1))
    nodes = [a, b, c]
    assert to_read(nodes, TreeShape(9, together=0.0)) == [a, b, c]
    assert to_read(nodes, TreeShape(9, together=0.5)) == [a, b]
    assert to_read(nodes, TreeShape(9, together=1.0)) == [a]
    assert to_read(nodes, TreeShape(3, together=0.0)) == [a, b]  # nothing below the last of a full tree can be a node
    a.law = b.law = LAW
    assert to_read(nodes, TreeShape(3, together=0.0)) == []


def laws_of(seed, vocabulary=4):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(vocabulary, generator=generator, dtype=torch.float64).softmax(0) ** 3 for _ in range(2))


def drawn(q, width, generator):
    return draw(q.log()[None], TreeShape(9, width), 1.0, generator)[1][0].tolist()


def counts_of(rule, q, p, width, samples=8000):
    generator = torch.Generator().manual_seed(0)
    tokens = [rule(drawn(q, width, generator), q, p, generator)[1] for _ in range(samples)]
    return np.bincount(tokens, minlength=len(p)) / samples


def with_replacement(tokens, q, p, generator):
    """Wrong on purpose: the draft's law is left as if the rejected token could come again."""
    for place, token in enumerate(tokens):
        if torch.rand((), generator=generator, dtype=p.dtype) * q[token] < p[token]:
            return place, token
        p = residual(p, q)
    return None, int(sample(p[None], generator))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_one_token_follows_the_targets_law(width):
    for seed in range(2):
        p, q = (law / law.sum() for law in laws_of(seed))
        assert np.abs(counts_of(try_in_turn, q, p, width) - p.numpy()).max() < 0.02


def test_a_rule_that_forgets_what_was_drawn_does_not():
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), torch.tensor([0.7, 0.1, 0.1, 0.1]).double()
    assert np.abs(counts_of(with_replacement, q, p, 3) - p.numpy()).max() > 0.04
    assert np.abs(counts_of(try_in_turn, q, p, 3) - p.numpy()).max() < 0.02


def test_greedy_keeps_the_targets_choice_wherever_it_stands():
    q, p = torch.tensor([0.6, 0.3, 0.1]).double(), torch.tensor([0.0, 0.0, 1.0]).double()
    generator = torch.Generator().manual_seed(0)
    assert try_in_turn([0, 1, 2], q, p, generator) == (2, 2)
    assert try_in_turn([0, 1], q, p, generator) == (None, 2)
    assert try_in_turn([], None, p, generator) == (None, 2)


def test_a_candidate_that_is_never_drawn_is_never_kept():
    """A law of one token has no second candidate: what fills its place must not crowd out the target's other tokens."""
    q, p = torch.tensor([1.0, 0, 0], dtype=torch.float64), torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    found = [try_in_turn([0, 1, 2], q, p, generator)[1] for _ in range(400)]
    assert 150 < found.count(1) < 250 and found.count(0) == 0


def test_candidates_are_drawn_without_replacement_in_the_laws_order():
    q = torch.tensor([0.5, 0.25, 0.125, 0.125]).double()
    generator = torch.Generator().manual_seed(0)
    rows = np.array([drawn(q, 3, generator) for _ in range(6000)])
    assert all(len(set(row)) == 3 for row in rows)
    assert np.bincount(rows[:, 0]) / len(rows) == pytest.approx(q.numpy(), abs=0.02)
    second = rows[rows[:, 0] == 0, 1]
    assert np.bincount(second, minlength=4) / len(second) == pytest.approx(without(q, 0).numpy(), abs=0.03)
    law, tokens, chances = draw(q.log()[None], TreeShape(9, 2), 0.0, generator)
    assert tokens.tolist() == [[0, 1]] and chances.tolist() == [[0.5, 0.25]]


def test_an_accepted_candidate_that_is_no_node_ends_the_round():
    root = node(None, 1.0)
    a, b = node(root, 0.7, token=1), node(root, 0.2, token=2)
    node(a, 0.5, token=3)
    root.law = a.law = torch.full((8,), 1 / 8).double()
    choice = {1: torch.eye(8)[1].double(), 2: torch.eye(8)[2].double(), 3: torch.eye(8)[3].double()}
    generator = torch.Generator().manual_seed(0)
    assert follow(root, [a], {root: choice[1], a: choice[3]}, try_in_turn, generator) == ([a], 3)
    assert follow(root, [a], {root: choice[2], a: choice[3]}, try_in_turn, generator) == ([], 2)
    assert follow(root, [a, b], {root: choice[3], a: choice[3]}, try_in_turn, generator) == ([], 3)


def test_beliefs_are_fitted_to_what_the_target_does():
    generator = torch.Generator().manual_seed(0)
    draft = torch.randn(4000, 6, generator=generator).double() * 2
    gumbel = -(-torch.rand(draft.shape, generator=generator).double().log()).log()
    assert fit_sharpened(draft, draft + 0.4 * gumbel).scale == pytest.approx(0.4, rel=0.12)
    law, tokens = draft.softmax(1), draft.topk(3).indices
    assert torch.equal(Sharpened(1.0)(law, tokens).round(decimals=9), as_drafted(law, tokens).round(decimals=9))
    believed = float(Sharpened(0.4)(law, tokens)[:, 0].mean())
    agreed = ((draft + 0.4 * gumbel).argmax(1) == tokens[:, 0]).double().mean()
    assert believed == pytest.approx(float(agreed), abs=0.02)


def test_the_coupled_belief_is_the_rate_of_rejections():
    generator = torch.Generator().manual_seed(0)
    draft = torch.randn(60, 5, generator=generator).double()
    target = draft + 0.5 * torch.randn(60, 5, generator=generator).double()
    fit, (q, p) = fit_coupled(draft, target), (draft.softmax(1), target.softmax(1))
    tried, rejected, second, second_rejected = 0, 0, 0, 0
    believed = 0.0
    for place in range(60):
        for _ in range(60):
            law, tokens, chances = draw(draft[place][None], TreeShape(9, 2, fit), 1.0, generator)
            found, _ = try_in_turn(tokens[0].tolist(), q[place], p[place], generator)
            tried, rejected, believed = tried + 1, rejected + (found != 0), believed + 1 - float(chances[0, 0])
            second, second_rejected = second + (found != 0), second_rejected + (found is None)
    assert believed / tried == pytest.approx(rejected / tried, abs=0.02)
    assert fit.later == pytest.approx(second_rejected / second, abs=0.06)
    assert isinstance(fit, Coupled) and 0 < fit.doubt < 1
