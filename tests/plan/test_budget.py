"""Bytes to slots and back, beside the paper's slots."""

import pytest

from specter_lab.errors import UserError
from specter_lab.experiments.specter.setting import BUDGETS
from specter_lab.models.anatomy import anatomy_of
from specter_lab.plan.budget import WORKSPACE_BYTES, bytes_for, fixed_bytes, scene_within, slots_for
from specter_lab.plan.memory import footprints
from specter_lab.plan.policies import POLICIES, find_policy
from specter_lab.plan.simulate import simulate
from tests.plan.made import scene_of, windows_of

ORIGINALS = {"qwen": "Qwen1.5-MoE-A2.7B", "phi": "Phi-3.5-MoE", "deepseek": "DeepSeek-V2-Lite"}
CONTEXT = 144  # 16 + 128 tokens


@pytest.mark.parametrize(
    ("family", "high", "low"), [("qwen", 22, 12), ("phi", 3, 1), ("deepseek", 29, 16)], ids=list(ORIGINALS)
)
def test_the_papers_budgets_hold_the_papers_slots(family, high, low):
    """And more: what else the paper's system keeps in its budget is not known."""
    model, paper, specter = anatomy_of(ORIGINALS[family]), BUDGETS[family], find_policy("specter")
    ours = [slots_for(specter, model, int(gb * 1e9), CONTEXT) for gb in (paper.high_gb, paper.low_gb)]
    assert ours == [high, low]
    assert ours[0] >= paper.high_slots and ours[1] >= paper.low_slots


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.id)
def test_slots_and_bytes_are_inverse(policy):
    model = anatomy_of(ORIGINALS["qwen"])
    for slots in (1, 7, 60):
        enough = bytes_for(policy, model, slots, CONTEXT)
        assert slots_for(policy, model, enough, CONTEXT) == slots
        if slots > 1:
            assert slots_for(policy, model, enough - 1, CONTEXT) == slots - 1
    assert slots_for(policy, model, 10**12, CONTEXT) == 60


def test_bytes_are_those_of_the_memory_table():
    """Shared and apart, the same parts as `plan.memory` counts."""
    model = anatomy_of(ORIGINALS["qwen"])
    apart, *_, shared = footprints(model, context_tokens=CONTEXT, draft_experts=60, target_experts=5)
    assert bytes_for(find_policy("specter"), model, 5, CONTEXT) == shared.total + WORKSPACE_BYTES
    assert bytes_for(find_policy("specmoeoff"), model, 5, CONTEXT) == apart.total + WORKSPACE_BYTES
    lru = fixed_bytes(find_policy("lru"), model, CONTEXT)
    assert lru.int4_pool == lru.own_copies == 0
    assert fixed_bytes(find_policy("ss-moe"), model, CONTEXT) == lru
    eight = fixed_bytes(find_policy("lru"), model, CONTEXT, batch=8)
    assert eight.kv_cache == 8 * lru.kv_cache and eight.weights == lru.weights


@pytest.mark.parametrize("name", ["specter", "lru", "lru-s", "adapmoe", "specmoeoff", "ss-moe"])
def test_a_scene_within_a_budget_keeps_it(name):
    policy = find_policy(name)
    workload, scene = scene_of(windows_of(fewer=name == "ss-moe"))
    model = scene.costs.model
    for slots in (2, 3, 5):
        budget = bytes_for(policy, model, slots, CONTEXT) + 1
        fitted = scene_within(scene, policy, budget, CONTEXT)
        assert policy.slots(fitted).sum() == slots * scene.layers
        assert simulate(workload, policy, fitted, new_tokens=4).rounds.end_ms[-1] > 0


def test_less_than_one_slot_per_layer_is_refused_with_numbers():
    model = anatomy_of(ORIGINALS["phi"])
    with pytest.raises(UserError) as error:
        slots_for(find_policy("specmoeoff"), model, 32 * 10**9, CONTEXT)
    assert str(error.value) == (
        "32.00 GB do not hold one expert slot in each of the 32 MoE layers of Phi-3.5-MoE under 'specmoeoff', which takes "
        "32.80 GB (weights 3.22, int4 pool 20.76, own copies 3.23, kv cache 0.02, workspace 0.54, slots 5.03): give 0.80 GB "
        "more, or give up a draft of its own weights (3.23 GB); the INT4 draft, as lru-s or adapmoe do (20.76 GB); "
        "context (0.02 GB)"
    )
    with pytest.raises(UserError, match=r"give 1.00 GB more, or give up context \(0.02 GB\)$"):
        slots_for(find_policy("lru"), model, bytes_for(find_policy("lru"), model, 1, CONTEXT) - 10**9, CONTEXT)
