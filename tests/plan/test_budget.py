"""Bytes to slots and back, beside the paper's slots."""

import pytest

from specter_lab.errors import UserError
from specter_lab.experiments.specter.setting import BUDGETS
from specter_lab.models.anatomy import anatomy_of
from specter_lab.plan.budget import WORKSPACE_BYTES, bytes_for, fixed_bytes, held_bytes, scene_within, slots_for
from specter_lab.plan.hardware import read_profile
from specter_lab.plan.memory import footprints
from specter_lab.plan.policies import POLICIES, find_policy
from specter_lab.plan.policy import Scene
from specter_lab.plan.simulate import simulate
from specter_lab.plan.step_costs import HOST_SYSTEM_BYTES, StepCosts
from specter_lab.plan.workload import workload_for
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


DEEPSEEK = anatomy_of(ORIGINALS["deepseek"])


def deepseek_on(profile, slots):
    return Scene(StepCosts(DEEPSEEK, read_profile(profile), context_tokens=CONTEXT), slots, depth=4)


def test_a_memory_that_is_shared_holds_the_hosts_copies_too():
    """With 16 slots a layer the 28.8 GB of copies fit into 64 GB as well; 56 leave room for some, the others stay on disk."""
    specter, copies = find_policy("specter"), DEEPSEEK.routed_experts * 2
    apart, shared, much = (
        held_bytes(specter, scene, CONTEXT)
        for scene in (
            deepseek_on("a100-40gb-pcie4", 16),
            deepseek_on("jetson-orin", 16),
            deepseek_on("jetson-orin", 56),
        )
    )
    assert sum(apart.values()) == bytes_for(specter, DEEPSEEK, 16, CONTEXT) and "host copies" not in apart
    assert shared == apart | {"host copies": copies} and 28.7e9 < copies < 28.9e9
    of_layer = 26 * DEEPSEEK.expert_bytes  # one expert in each
    assert 0 < much["host copies"] < copies and much["host copies"] % of_layer == 0
    assert 0 <= 64e9 - HOST_SYSTEM_BYTES - sum(much.values()) < of_layer


@pytest.mark.parametrize("slots", [16, 56])
def test_what_host_memory_does_not_hold_is_read_from_disk(slots):
    """On a Jetson, before it is copied; a read takes many times as long as a copy."""
    windows = windows_of(layers=2, experts=64, top_k=6, positions=4, requests=2)
    workload = workload_for(windows, DEEPSEEK)
    found = simulate(workload, find_policy("specter"), deepseek_on("jetson-orin", slots), new_tokens=4, record=True)
    held = held_bytes(find_policy("specter"), deepseek_on("jetson-orin", slots), CONTEXT)["host copies"]
    first = held // (26 * DEEPSEEK.expert_bytes)
    copied = [span.expert for span in found.spans if span.work in ("miss", "prefetch")]
    read = [span for span in found.spans if span.stream == "disk"]
    assert sorted(span.expert for span in read) == sorted(expert for expert in copied if expert >= first)
    assert bool(read) == (slots == 56)
    for span in read:
        assert span.end_ms - span.start_ms == pytest.approx(5.044, abs=1e-3)  # 17.3 MB at 3.43 GB/s


@pytest.mark.parametrize(("family", "machine", "on_host"), [
    ("phi", "jetson-orin", 9), ("phi", "rtx4090", 11), ("phi", "a100-40gb-pcie4", 16), ("qwen", "rtx4090", 60),
])  # fmt: skip
def test_where_experts_lie(family, machine, on_host):
    """With 10 GB on the GPU: (64 - 4.3 - 10) GB hold 9 experts of each of Phi's 32 layers, 5.03 GB for each."""
    costs = StepCosts(anatomy_of(ORIGINALS[family]), read_profile(machine)).placed(10 * 10**9)
    assert costs.disk.first == on_host
    share = 1 - on_host / costs.model.num_experts
    assert (costs.disk.read_ms > 0) == (share > 0)
    assert costs.pace_ms == max(costs.copy_ms, costs.disk.read_ms * share)
    assert costs.of_pass(1).disk == costs.disk


def test_routing_takes_a_small_copy():
    costs = StepCosts(DEEPSEEK, read_profile())
    assert (
        costs.of_pass(17).routing_ms == costs.routing_ms(1, 26) == costs.profile.d2h.times_ms[0]
    )  # the least there is
    assert 0.01 < costs.routing_ms(1, 26) < 0.012
    assert costs.routing_ms(32, 26) > costs.routing_ms(1, 26)  # 60 kB


def test_no_bytes_and_nothing_to_give_up():
    model, lru = anatomy_of(ORIGINALS["qwen"]), find_policy("lru")
    with pytest.raises(UserError, match="^a budget of -5 bytes is none: give what the GPU may hold, in bytes$"):
        slots_for(lru, model, -5, CONTEXT)
    with pytest.raises(UserError, match=r"give 1.00 GB more$"):
        slots_for(lru, model, bytes_for(lru, model, 1, 8) - 10**9, 8)  # a context of 1.6 MB is no way out


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
