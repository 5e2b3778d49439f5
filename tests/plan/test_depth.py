import numpy as np
import pytest

from specter_lab.measure.acceptance import Residency
from specter_lab.measure.speculate import Rounds
from specter_lab.models.anatomy import anatomy_of
from specter_lab.plan.cost import round_cost
from specter_lab.plan.depth import Tpot, best_depth, round_costs, tpot_definitions
from specter_lab.plan.hardware import read_profile


def rounds_of(accepted, request, depth):
    none = np.zeros((len(accepted), 1, 4), dtype=bool)
    return Rounds(depth, np.array(request), np.full(len(accepted), 20), np.array(accepted), none, none)


def test_definitions_by_hand():
    """10 new tokens in rounds of 100, 20, 20 ms that commit 5, 3, 5 tokens."""
    rounds = rounds_of([4, 2, 4], [0, 0, 0], depth=4)
    found = tpot_definitions(rounds, np.array([100.0, 20.0, 20.0]), new_tokens=10)
    assert {name: (t.ms.item(), t.tokens.item()) for name, t in found.items()} == {
        "paper": (40, 9), "steady": (40, 8), "decode": (140, 10),
    }  # fmt: skip


@pytest.mark.parametrize("depth", [3, 16])
def test_the_papers_formula_flatters_deep_speculation(depth):
    """Equal rounds: N tokens in N / (K + 1) of them. Trap 2: the first burst of K + 1 tokens is free."""
    new_tokens = 4 * 17 * 2
    count = new_tokens // (depth + 1)
    found = tpot_definitions(rounds_of([depth] * count, [0] * count, depth), np.full(count, 7.0), new_tokens)
    paper, steady = (t.ms.sum() / t.tokens.sum() for t in (found["paper"], found["steady"]))
    assert paper / steady == pytest.approx((count - 1) * (depth + 1) / (new_tokens - 1))
    assert 1 - paper / steady == pytest.approx(depth / (new_tokens - 1))


def test_rounds_are_priced_with_what_was_measured():
    model, profile = anatomy_of("Qwen1.5-MoE-A2.7B"), read_profile("a100-40gb-pcie4")
    rounds = rounds_of([4, 2], [0, 0], depth=4)
    held = Residency(np.array([12.0, 10.0]), np.array([0.0, 10.0]), np.array([9.0, 0.0]))
    common = dict(depth=4, slots=15, context_tokens=20)
    assert round_costs(rounds, held, model, profile, slots=15) == [
        round_cost(model, profile, distinct_experts=12, resident_experts=0, predicted_share=0.75, **common),
        round_cost(model, profile, distinct_experts=10, resident_experts=10, **common),
    ]


def test_best_depth():
    generator = np.random.default_rng(0)
    tokens = np.full(40, 100.0)
    by_depth = {k: Tpot(tokens * (abs(k - 8) + 10) * generator.normal(1, 0.02, 40), tokens) for k in (2, 4, 8, 16)}
    found = best_depth(by_depth)
    assert (found.depth, found.low, found.high, found.n_requests) == (8, 8, 8, 40)
    by_depth[16] = Tpot(by_depth[8].ms * generator.normal(1, 0.05, 40), tokens)
    unsure = best_depth(by_depth)
    assert (unsure.low, unsure.high) == (8, 16)
