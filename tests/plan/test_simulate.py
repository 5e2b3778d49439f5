"""The simulator: schedules computed by hand, a plain reference, conservation laws, determinism, bad input."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_lab.errors import UserError
from specter_lab.paths import ROOT
from specter_lab.plan import serve
from specter_lab.plan import simulate as simulator
from specter_lab.plan.policies import POLICIES, find_policy
from specter_lab.plan.policies.specter import ChunkedPrefetch
from specter_lab.plan.policies.specter_fast import RollingPrefetch
from specter_lab.plan.policy import Policy, Prefetcher, equal_slots, separate_slots
from specter_lab.plan.replay import Replay
from specter_lab.plan.residency import FIFO, LFU, LRU
from specter_lab.plan.simulate import simulate
from tests.plan.made import scene_of, windows_of
from tests.plan.reference import Reference

DEMAND = Policy("demand", "", "", draft=None)
ORDERS = {"lru": LRU, "fifo": FIFO, "lfu": LFU}
MISSES = {
    "load": serve.LOAD, "cpu if sooner": serve.CPU_IF_SOONER, "read through": serve.READ_THROUGH,
    "admit": serve.ADMIT, "int4": serve.DRAFT_WEIGHTS, "cpu if shorter": serve.CPU_IF_SHORTER,
}  # fmt: skip
PREFETCH = {
    "chunks": ChunkedPrefetch, "chunks, early": partial(ChunkedPrefetch, last_plan=False), "rolling": RollingPrefetch,
}  # fmt: skip


def one_request(draft, target, *, experts=4, accepted=0, prompt=None):
    """Windows of one request with one position; draft [K][L][k], target [K + 1][L][k]."""
    draft, target = np.array(draft, np.uint8), np.array(target, np.uint8)
    depth, (layers, top_k) = len(target) - 1, target.shape[1:]
    made = windows_of(requests=1, positions=1, depth=depth, layers=layers, experts=experts, top_k=top_k, prompt=2)
    used = target[0] if prompt is None else np.array(prompt, np.uint8)
    drafted = draft[None, None] if depth else made.draft
    return replace(
        made, draft=drafted, draft_weights=np.full(drafted.shape, 0.5, np.float16), target=target[None, None],
        prompt=used[None, None], accepted=np.full((1, 1), accepted),
    )  # fmt: skip


def of_work(simulation, *names):
    """(work, layer, expert, start, end) of the spans with these names."""
    return [(s.work, s.layer, s.expert, s.start_ms, s.end_ms) for s in simulation.spans if s.work in names]


def test_by_hand_a_miss_waits_for_its_copy():
    """One layer, prompt uses expert 0; the token uses 0 (there) and 1 (not there)."""
    workload, scene = scene_of(one_request([], [[[0, 1]]], prompt=[[0, 0]]), slots=2)
    found = simulate(workload, DEMAND, scene, new_tokens=1, record=True)
    # prefill: attention 0-1, copy 1-11, expert 11-13. Token: attention 13-14, residents 14-16, copy 14-24, expert 24-26.
    assert of_work(found, "attention", "resident experts", "expert", "miss") == [
        ("attention", 0, -1, 0, 1), ("miss", 0, 0, 1, 11), ("expert", 0, 0, 11, 13), ("attention", 0, -1, 13, 14),
        ("resident experts", 0, -1, 14, 16), ("miss", 0, 1, 14, 24), ("expert", 0, 1, 24, 26),
    ]  # fmt: skip
    assert (found.rounds.start_ms[0], found.rounds.end_ms[0], found.rounds.stall_ms[0]) == (13, 26, 8)
    assert found.rounds.h2d_bytes[0] == scene.costs.expert_bytes and found.hits.rates()["distinct"] == 0.5


def test_by_hand_one_slot_for_two_experts():
    """The second expert's copy waits until the first has been computed: its slot is in use."""
    workload, scene = scene_of(one_request([], [[[1, 2]]], prompt=[[0, 0]]), slots=1)
    found = simulate(workload, DEMAND, scene, new_tokens=1, record=True)
    # token: attention 13-14, copy of 1 14-24, compute 24-26, only then copy of 2 26-36, compute 36-38.
    assert of_work(found, "miss", "expert")[2:] == [
        ("miss", 0, 1, 14, 24), ("expert", 0, 1, 24, 26), ("miss", 0, 2, 26, 36), ("expert", 0, 2, 36, 38),
    ]  # fmt: skip
    assert found.rounds.stall_ms[0] == 20


def test_by_hand_a_prefetch_behind_the_draft_and_a_barrier():
    """Two drafted tokens of 4 ms; the plan after the first copies expert 1 (10 ms): the barrier waits for 6 of them."""
    windows = one_request([[[0, 1]], [[0, 1]]], [[[0, 1]]] * 3, prompt=[[0, 0]], accepted=2)
    workload, scene = scene_of(windows, slots=2)
    found = simulate(workload, find_policy("specter"), scene, new_tokens=1, record=True)
    # prefill ends at 13; draft 13-17, 17-21; copy 17-27; barrier; attention 27-28; both experts 28-32.
    assert of_work(found, "draft step", "prefetch")[0:] == [
        ("draft step", -1, -1, 13, 17), ("prefetch", 0, 1, 17, 27), ("draft step", -1, -1, 17, 21),
    ]  # fmt: skip
    assert (found.rounds.end_ms[0], found.rounds.stall_ms[0]) == (32, 6)
    assert found.hidden_share == pytest.approx(0.4) and found.hits.rates()["distinct"] == 1
    assert found.hits.counts[serve.PREFETCHED_USED] == 1


def test_by_hand_without_a_barrier_attention_hides_the_copy():
    windows = one_request([[[0, 1]], [[0, 1]]], [[[0, 1]]] * 3, prompt=[[0, 0]], accepted=2)
    workload, scene = scene_of(windows, slots=2)
    found = simulate(workload, find_policy("specter-fast"), scene, new_tokens=1, record=True)
    # copy 17-27; attention 21-22; resident expert 22-24; the one in flight waits until 27, 27-29.
    assert of_work(found, "prefetch") == [("prefetch", 0, 1, 17, 27)]
    assert (found.rounds.end_ms[0], found.rounds.stall_ms[0]) == (29, 3)
    assert found.hits.counts[serve.NEEDED_IN_FLIGHT] == 1


def test_by_hand_a_fewer_expert_draft_waits_for_its_own_misses():
    """The draft uses expert 1 alone: missing at its first step, there at the second and for the verification."""
    windows = one_request([[[1]], [[1]]], [[[1, 1]]] * 3, prompt=[[0, 0]], accepted=2)
    workload, scene = scene_of(windows, slots=1)
    found = simulate(workload, find_policy("ss-moe"), scene, new_tokens=1, record=True)
    # prefill ends at 13; step 1: attention 13-14, copy 14-24, expert 24-26; step 2: 26-27, 27-29; target: 29-30, 30-32.
    assert (found.rounds.drafted_ms[0], found.rounds.end_ms[0], found.rounds.stall_ms[0]) == (29, 32, 10)
    assert found.rounds.h2d_bytes[0] == scene.costs.expert_bytes
    assert (found.hits.draft_uses, found.hits.draft_uses_ready) == (2, 1)


def tree_of(*steps, used, accepted=1, experts=4):
    """A replayed round: per step of the draft nodes [W][k] that stay and how many it read; one layer."""
    replay = Replay(num_experts=experts, layers=1)
    replay.begin_request()
    drafted = [np.array(nodes, np.uint8).reshape(-1, 1, 2) for nodes, _ in steps]
    weights = [np.full(nodes.shape, 0.5, np.float16) for nodes in drafted]
    replay.add_tree(accepted, drafted, weights, [read for _, read in steps], np.array(used, np.uint8)[None])
    return replay


def test_by_hand_a_tree_drafts_a_level_at_once():
    """Root and two nodes: the second step reads two tokens with three experts; the target needs experts 0 to 3."""
    replay = tree_of(([[0, 1]], (1, 2.0)), ([[0, 2], [0, 3]], (2, 3.0)), used=[[0, 1], [0, 2], [0, 3]])
    _, scene = scene_of(one_request([[[0, 1]]], [[[0, 1]]] * 2), slots=4)
    found = simulate(replay, find_policy("specter-fast"), scene, new_tokens=2, record=True)
    # attention of an empty prompt 1 ms; step of one token 4 ms, of two tokens with three experts 4 + 1 + 1. All are absent: what is not asked for in time is a miss
    assert of_work(found, "draft step") == [("draft step", -1, -1, 1, 5), ("draft step", -1, -1, 5, 11)]
    assert [span[2] for span in of_work(found, "prefetch", "miss")] == [0, 1, 2, 3]
    assert of_work(found, "prefetch")[0][3] == 5 and found.rounds.tokens.tolist() == [2]


def test_a_tree_of_width_one_takes_what_a_chain_takes():
    windows = windows_of(requests=1, positions=1, depth=3, layers=2)
    workload, scene = scene_of(windows, slots=3)
    replay, chain = Replay(8, 2), Replay(8, 2)
    used, drafted, weights = windows.target[0, 0].swapaxes(0, 1), windows.draft[0, 0], windows.draft_weights[0, 0]
    for each in (replay, chain):
        each.begin_request()
    chain.add(2, drafted, weights, used)
    replay.add_tree(2, drafted[:, None], weights[:, None], [(1, 2.0)] * 3, used)
    for policy in ("specter", "specter-fast"):
        tree, line = (simulate(each, find_policy(policy), scene, new_tokens=1, record=True) for each in (replay, chain))
        assert tree.spans == line.spans and tree.hits.rates() == line.hits.rates()


def test_nodes_that_lost_their_place_are_paid_for_and_not_prefetched():
    gone = tree_of(([[0, 1]], (1, 2.0)), ([], (2, 3.0)), used=[[0, 1], [0, 1]])
    _, scene = scene_of(one_request([[[0, 1]]], [[[0, 1]]] * 2), slots=4)
    found = simulate(gone, find_policy("specter-fast"), scene, new_tokens=2, record=True)
    kept, lost = (end - start for *_, start, end in of_work(found, "draft step"))
    assert lost > kept and [span[2] for span in of_work(found, "prefetch")] == [0, 1]


def test_by_hand_a_miss_is_copied_when_the_host_knows_of_it():
    """The case above with half a millisecond from GPU to host: a hit does not wait for it, a copy does."""
    workload, scene = scene_of(one_request([], [[[0, 1]]], prompt=[[0, 0]]), slots=2, told_ms=0.5)
    found = simulate(workload, DEMAND, scene, new_tokens=1, record=True)
    # prefill ends at 13.5. Token: attention 13.5-14.5, routing 14.5-15, residents 14.5-16.5, copy 15-25, expert 25-27.
    assert of_work(found, "routing", "resident experts", "miss", "expert")[3:] == [
        ("routing", 0, -1, 14.5, 15), ("resident experts", 0, -1, 14.5, 16.5), ("miss", 0, 1, 15, 25), ("expert", 0, 1, 25, 27),
    ]  # fmt: skip
    assert (found.rounds.end_ms[0], found.rounds.stall_ms[0]) == (27, 8.5)
    assert found.hidden_share == pytest.approx(0.15)
    slow = replace(scene, costs=replace(scene.costs, told_ms=3.0))
    late = simulate(workload, DEMAND, slow, new_tokens=1)
    assert late.rounds.stall_ms[0] == 11 and late.hidden_share == 0  # nothing of the 10 ms


def test_by_hand_a_plan_waits_for_the_drafted_token_to_reach_the_host():
    windows = one_request([[[0, 1]], [[0, 1]]], [[[0, 1]]] * 3, prompt=[[0, 0]], accepted=2)
    workload, scene = scene_of(windows, slots=2, told_ms=0.5)
    found = simulate(workload, find_policy("specter"), scene, new_tokens=1, record=True)
    # prefill ends at 13.5; draft until 17.5, its routing until 18, copy 18-28; barrier; attention 28-29, experts 29-33.
    assert of_work(found, "prefetch") == [("prefetch", 0, 1, 18, 28)]
    assert [span[3:] for span in of_work(found, "routing")] == [(1, 1.5), (17.5, 18), (21.5, 22), (29, 29.5)]
    assert found.rounds.end_ms[0] == 33


@pytest.mark.parametrize("miss", sorted(MISSES))
def test_the_host_is_told_only_where_it_has_to_act(miss):
    workload, scene = scene_of(windows_of(depth=0), slots=2, told_ms=0.5)
    found = simulate(workload, replace(DEMAND, miss=MISSES[miss]), scene, new_tokens=4, record=True)
    assert bool(of_work(found, "routing")) == (miss not in ("read through", "admit", "int4"))


def test_by_hand_few_slots_are_filled_half_by_half():
    """Seven experts in four slots, 20 ms from the end of a turn to the next copy: two halves, then half of one."""
    windows = one_request([], [[[0, 1, 2, 3, 4, 5, 6]]], experts=8, prompt=[[7] * 7])
    workload, scene = scene_of(windows, slots=4, turn_ms=20.0)
    found = simulate(workload, DEMAND, scene, new_tokens=1, record=True)
    # prefill ends at 13; attention 13-14, copies 14-54, experts until 26, 36, 46, 56: the first two make room at 56, the
    # others at 76, when the copies 56-76 have ended; the last one arrives at 86.
    assert [span[3] for span in of_work(found, "miss")][1:] == [14, 24, 34, 44, 56, 66, 76]
    assert found.rounds.end_ms[0] == 88 and found.rounds.h2d_ms[0] == 70


def test_by_hand_the_first_turn_is_of_those_that_are_there():
    """Experts 0 to 2 are there and compute in one go; three misses take their slots 20 ms later, beside one free slot before."""
    windows = one_request([], [[[0, 1, 2, 3, 4, 5, 6]]], experts=8, prompt=[[0, 1, 2, 0, 0, 0, 0]])
    workload, scene = scene_of(windows, slots=4, turn_ms=20.0)
    found = simulate(workload, DEMAND, scene, new_tokens=1, record=True)
    misses = [span for span in of_work(found, "miss") if span[2] > 2]
    began = misses[0][3]  # when attention has ended: three experts of 2 ms, a turn, then copies of 10 ms
    assert [span[3] - began for span in misses] == [0, 26, 36, 46]


def test_by_hand_a_single_slot_is_a_turn_for_every_expert():
    workload, scene = scene_of(one_request([], [[[0, 1]]], prompt=[[2, 2]]), slots=1, turn_ms=0.5)
    found = simulate(workload, DEMAND, scene, new_tokens=1, record=True)
    # prefill ends at 13; attention 13-14, copy 14-24, expert 24-26, a turn, copy 26.5-36.5, expert 36.5-38.5.
    assert of_work(found, "miss")[1:] == [("miss", 0, 0, 14, 24), ("miss", 0, 1, 26.5, 36.5)]
    assert found.rounds.end_ms[0] == 38.5
    free = replace(scene, costs=replace(scene.costs, turn_ms=0.0))
    ends = [
        simulate(workload, replace(DEMAND, miss=serve.ADMIT), one, new_tokens=1).rounds.end_ms for one in (scene, free)
    ]
    assert ends[0] == ends[1]  # a kernel waits for no host


def test_by_hand_rows_of_the_hosts_cores_are_taken_in_one_go():
    """5 ms each: two of three misses beside a link of 8 ms, all three beside one of 30; half a millisecond after them the rows."""
    windows = one_request([], [[[0, 1, 2]]], prompt=[[3, 3, 3]])
    ends = []
    for copy_ms in (8.0, 30.0):
        workload, scene = scene_of(windows, slots=4, copy_ms=copy_ms, turn_ms=0.5)
        found = simulate(workload, replace(DEMAND, miss=serve.CPU_IF_SOONER), scene, new_tokens=1, record=True)
        ends.append((len(of_work(found, "CPU expert")) - 1, found.rounds.end_ms[0], found.rounds.stall_ms[0]))
    # prefill: attention 0-1, CPU 1-6, rows 6.5. Token: attention 6.5-7.5, CPU 7.5-12.5 (-17.5, -22.5), rows half a ms later;
    # with a link of 8 ms the second is copied 7.5-15.5 and computed 15.5-17.5, while the third ends at 17.5.
    assert ends == [(2, 18.0, 8.5), (3, 23.0, 15.5)]


def test_who_computes_a_miss_is_decided_before_the_turns():
    """As `sooner_by_cpu` does for the engine, which has the same queue before it."""
    windows = one_request([], [[[0, 1, 2, 3, 4, 5, 6]]], experts=8, prompt=[[7] * 7])
    expected = np.flatnonzero(serve.sooner_by_cpu(7, 0.0, 10.0, 9.0)).tolist()
    for turn_ms in (0.0, 8.0):
        workload, scene = scene_of(windows, slots=1, turn_ms=turn_ms, cpu_read_ms=9.0, read_ms=0.0)
        found = simulate(workload, replace(DEMAND, miss=serve.CPU_IF_SOONER), scene, new_tokens=1, record=True)
        assert [span[2] for span in of_work(found, "CPU expert") if span[2] < 7] == expected


def test_by_hand_an_expert_comes_from_disk():
    """Reads of 20 ms, copies of 10 behind them; the second read does not wait for the first copy. Host memory holds expert 0."""
    workload, scene = scene_of(one_request([], [[[1, 2]]], prompt=[[0, 0]]), slots=3, disk_ms=20.0, on_host=1)
    found = simulate(workload, DEMAND, scene, new_tokens=1, record=True)
    # prefill: attention 0-1, copy 1-11, expert 11-13. Token: attention 13-14, reads 14-34, 34-54.
    assert of_work(found, "disk read", "miss", "expert")[2:] == [
        ("disk read", 0, 1, 14, 34), ("miss", 0, 1, 34, 44), ("expert", 0, 1, 44, 46),
        ("disk read", 0, 2, 34, 54), ("miss", 0, 2, 54, 64), ("expert", 0, 2, 64, 66),
    ]  # fmt: skip
    assert found.rounds.h2d_bytes[0] == 2 * scene.costs.expert_bytes and found.rounds.h2d_ms[0] == 20


def test_by_hand_the_last_plan_sees_all_drafted_tokens():
    """One slot: the first token's expert is all that fits, but the others' is what the window needs most."""
    windows = one_request([[[1]], [[2]], [[2]]], [[[1]], [[2]], [[2]], [[2]]], prompt=[[0]], accepted=3)
    workload, scene = scene_of(windows, slots=1)
    both = [
        simulate(workload, find_policy(name), scene, new_tokens=1, record=True) for name in ("specter", "specter-early")
    ]
    # draft 13-17-21-25; expert 1 is planned at 17 and copied until 27; expert 2 when the draft has ended, until 37.
    assert [of_work(found, "prefetch") for found in both] == [
        [("prefetch", 0, 1, 17, 27), ("prefetch", 0, 2, 27, 37)], [("prefetch", 0, 1, 17, 27)]
    ]  # fmt: skip
    assert [found.hits.rates()["token-weighted"] for found in both] == [0.75, 0.25]


@settings(max_examples=400)
@given(
    seed=st.integers(0, 10_000), slots=st.integers(1, 7), order=st.sampled_from(sorted(ORDERS)),
    miss=st.sampled_from(sorted(MISSES)), prefetch=st.sampled_from([None, *PREFETCH]), barrier=st.booleans(),
    depth=st.integers(0, 4), copy_ms=st.sampled_from([0.5, 3.0, 10.0]), layers=st.integers(1, 4),
    told_ms=st.sampled_from([0.0, 0.25, 3.0]), turn_ms=st.sampled_from([0.0, 0.5, 4.0]),
    disk_ms=st.sampled_from([0.0, 1.0, 20.0]), on_host=st.sampled_from([0, 3, 7]),
)  # fmt: skip
def test_equals_the_reference(
    seed, slots, order, miss, prefetch, barrier, depth, copy_ms, layers, told_ms, turn_ms, disk_ms, on_host
):
    windows = windows_of(seed, requests=2, positions=6, depth=4, layers=layers)
    workload, scene = scene_of(
        windows, slots, depth=depth, copy_ms=copy_ms, told_ms=told_ms, turn_ms=turn_ms, disk_ms=disk_ms, on_host=on_host
    )
    policy = replace(DEMAND, draft="int4", order=ORDERS[order], miss=MISSES[miss], barrier=barrier)
    policy = replace(policy, prefetch=PREFETCH[prefetch]) if prefetch else policy
    found = simulate(workload, policy, scene, new_tokens=6)
    plain = Reference(
        windows, scene.costs, slots=slots, order=order, miss=miss, prefetch=prefetch, barrier=barrier, depth=depth
    )
    rows = plain.simulate([0, 1], 6)
    rounds, counts = found.rounds, found.hits.counts
    times = np.stack([rounds.start_ms, rounds.drafted_ms, rounds.end_ms, rounds.stall_ms], axis=1)
    np.testing.assert_allclose(times, rows[:, :4], rtol=1e-9)
    if miss != "read through":
        np.testing.assert_array_equal(rounds.h2d_bytes, rows[:, 4] * scene.costs.expert_bytes)
    assert (counts[serve.NEEDED], counts[serve.NEEDED_READY]) == (plain.needed, plain.hits)
    into_slots = counts[serve.COPIES] + (counts[serve.READ_THROUGH_MISSES] if miss == "admit" else 0)
    assert into_slots == plain.copies


def windows_for(policy, seed=0, **shape):
    return windows_of(seed, fewer=policy.draft == "fewer", **shape)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.id)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("slots", [1, 3])
def test_conservation(policy, batch, slots, monkeypatch):
    """Bytes are copies, time runs forward, streams do one thing at a time, slots stay within the budget."""
    workload, scene = scene_of(windows_for(policy, requests=4, positions=10), slots, told_ms=0.5, turn_ms=0.25)
    budget, in_prefills, looks = policy.slots(scene), 0, 0

    def watched(function):
        def call(slots, *arguments):
            nonlocal looks
            result = function(slots, *arguments)
            check_slots(slots, budget)
            looks += 1
            return result

        return call

    def prefill(state, *arguments):
        nonlocal in_prefills
        before = state.moved_bytes()
        end = real_prefill(state, *arguments)
        in_prefills += state.moved_bytes() - before
        return end

    real_prefill = simulator._prefill
    monkeypatch.setattr(simulator, "_prefill", prefill)
    monkeypatch.setattr(simulator, "serve", watched(serve.serve))
    monkeypatch.setattr(simulator, "prefetch", watched(serve.prefetch))
    found = simulate(workload, policy, scene, new_tokens=10, batch=batch, record=True)
    counts, rounds = found.hits.counts, found.rounds
    copied = [s for s in found.spans if s.work in ("prefetch", "miss", "zero-copy")]
    assert looks > len(rounds.depth)
    assert rounds.h2d_bytes.sum() == len(copied) * scene.costs.expert_bytes - in_prefills
    if policy.draft != "fewer":
        assert counts[serve.COPIES] + counts[serve.READ_THROUGH_MISSES] == len(copied)
    assert (rounds.start_ms <= rounds.drafted_ms).all() and (rounds.drafted_ms < rounds.end_ms).all()
    assert (rounds.start_ms[1:] >= rounds.end_ms[:-1]).all()
    for stream in {s.stream for s in found.spans}:
        of_stream = [s for s in found.spans if s.stream == stream]
        assert all(a.end_ms <= b.start_ms + 1e-9 for a, b in zip(of_stream, of_stream[1:]))
    assert counts[serve.NEEDED] >= counts[serve.NEEDED_READY] + counts[serve.NEEDED_IN_FLIGHT]
    assert counts[serve.USES] >= counts[serve.USES_READY] + counts[serve.USES_IN_FLIGHT]
    assert all(0 <= rate <= 1 for rate in found.hits.rates().values() if rate == rate)
    assert all(sum(tokens for _, tokens in commits) >= 10 for commits in found.commits.values())


def check_slots(slots, budget):
    """No layer holds more than its slots, and a slot holds one expert."""
    assert (slots.count == budget).all() and (slots.filled <= budget).all()
    for layer, count in enumerate(budget):
        resident = np.flatnonzero(slots.slot_of[layer] >= 0)
        places = slots.slot_of[layer, resident]
        assert len(resident) == slots.filled[layer] <= count
        assert len(set(places)) == len(places) and (places < count).all()
        assert (slots.expert_in[layer, places] == resident).all()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.id)
def test_the_same_twice(policy):
    workload, scene = scene_of(windows_for(policy), slots=3)
    first, second = (simulate(workload, policy, scene, new_tokens=12, record=True) for _ in range(2))
    assert first.spans == second.spans and (first.hits.counts == second.hits.counts).all()


def test_compiled_and_plain_python_agree(tmp_path):
    """The same simulations in a process where nothing is compiled."""
    script = (
        "import json, sys\n"
        "from specter_lab.plan.policies import POLICIES\n"
        "from specter_lab.plan.simulate import simulate\n"
        "from tests.plan.made import scene_of, windows_of\n"
        "rows = {}\n"
        "for p in POLICIES.values():\n"
        "    workload, scene = scene_of(\n"
        "        windows_of(fewer=p.draft == 'fewer', requests=2, positions=6), slots=3, told_ms=0.5, turn_ms=0.25,\n"
        "        disk_ms=2.0, on_host=4)\n"
        "    s = simulate(workload, p, scene, new_tokens=6)\n"
        "    rows[p.id] = [s.rounds.end_ms.tolist(), s.rounds.stall_ms.tolist(), s.hits.counts.tolist()]\n"
        "json.dump(rows, sys.stdout)\n"
    )

    def rows(**environment):
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    plain, compiled = rows(NUMBA_DISABLE_JIT="1"), rows()
    assert plain.keys() == compiled.keys() == POLICIES.keys()
    for name, (ends, stalls, counts) in plain.items():
        assert counts == compiled[name][2], name
        np.testing.assert_allclose(ends, compiled[name][0], rtol=1e-12, err_msg=name)
        np.testing.assert_allclose(stalls, compiled[name][1], rtol=1e-9, atol=1e-9, err_msg=name)


def test_asking_layer_by_layer_is_the_same_as_all_at_once():
    """`verifying` and `ahead` are two ways to say one thing: everything that the next layer will use."""

    class Slow(Prefetcher):
        def __init__(self, scene):
            pass

        def begin(self, slots, depth, clock):
            self.slots = slots
            return super().begin(slots, depth, clock)

        def foresee(self, needs):
            self.needs = needs

        def verifying(self, layer, token_experts, clock):
            if layer + 1 == len(self.slots.count) or not hasattr(self, "needs"):
                return super().verifying(layer, token_experts, clock)
            rows = slice(self.needs.first[layer + 1], self.needs.first[layer + 2])
            experts = self.needs.experts[rows]
            self.slots.pinned[layer + 1, experts] = True
            experts = experts[self.slots.slot_of[layer + 1, experts] < 0]
            behind = max(0.0, clock.link_free_ms - clock.now_ms)
            experts = experts[: max(0, int(2 - behind / clock.copy_ms))]
            return np.full(len(experts), layer + 1), experts

    class Fast(Slow):
        verifying = Prefetcher.verifying

        def ahead(self, needs):
            if not hasattr(self, "needs"):
                return super().ahead(needs)
            layers = np.repeat(np.arange(len(needs.first) - 1), np.diff(needs.first))
            later = layers > 0
            return serve.Ahead(layers[later] - 1, layers[later], needs.experts[later])

    workload, scene = scene_of(windows_of(layers=4), slots=5, copy_ms=2.0)
    slow, fast = (
        simulate(workload, replace(DEMAND, prefetch=kind), scene, new_tokens=12, requests=[0]) for kind in (Slow, Fast)
    )
    np.testing.assert_allclose(slow.rounds.end_ms, fast.rounds.end_ms)
    assert (slow.hits.counts == fast.hits.counts).all() and slow.hits.counts[serve.PREFETCHED] > 0


def test_slots_for_fewer_than_a_windows_experts_take_turns():
    """One slot, windows that need up to eight experts: every expert gets its turn, prefetches are refused and counted."""
    workload, scene = scene_of(windows_of(depth=4), slots=1)
    found = simulate(workload, replace(find_policy("specter-fast"), prefetch=Refused), scene, new_tokens=12)
    assert found.hits.counts[serve.PREFETCH_REFUSED] > 0
    assert found.hits.counts[serve.COPIES] >= found.hits.counts[serve.NEEDED] - found.hits.counts[serve.NEEDED_READY]


class Refused(Prefetcher):
    """Pins one resident and asks for more than there are slots."""

    def __init__(self, scene):
        pass

    def begin(self, slots, depth, clock):
        self.slots = slots
        return super().begin(slots, depth, clock)

    def finish(self, clock):
        resident = self.slots.slot_of[0].argmax()
        self.slots.pinned[0, resident] = True
        return np.zeros(1, np.int64), np.array([(resident + 1) % self.slots.slot_of.shape[1]])


def test_bad_input_is_one_sentence():
    windows = windows_of(depth=3)
    workload, scene = scene_of(windows, slots=0)
    with pytest.raises(UserError, match="a budget of 0 slots per layer leaves layer 0 none: .* every layer needs 1$"):
        simulate(workload, find_policy("specter"), scene, new_tokens=4)
    workload, scene = scene_of(windows)
    with pytest.raises(UserError, match="13 new tokens were asked for, the windows hold 12"):
        simulate(workload, find_policy("lru"), scene, new_tokens=13)
    with pytest.raises(UserError, match="depth 9 was asked for, windows were recorded to depth 3"):
        simulate(workload, replace(find_policy("specter"), depth=9), scene, new_tokens=4)
    with pytest.raises(UserError, match="'ss-moe' drafts with 'fewer', the windows' draft used 2 of 2 experts: record"):
        simulate(workload, find_policy("ss-moe"), scene, new_tokens=4)
    fewer, scene = scene_of(windows_of(depth=3, fewer=True))
    with pytest.raises(UserError, match="'specter' drafts with 'int4', the windows' draft used 1 of 2 experts: record"):
        simulate(fewer, find_policy("specter"), scene, new_tokens=4)
    with pytest.raises(UserError, match="no policy 'mru': there are specter, "):
        find_policy("mru")


class Says:
    """A depth control that always says the same."""

    def __init__(self, depth):
        self.depth = depth

    def next_depth(self):
        return self.depth


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"new_tokens": 0}, "0 new tokens were asked for, the windows hold 12: give 1 to 12"),
        ({"batch": 0}, "a batch of 0 requests decodes nothing: give 1 or more"),
        ({"batch": -1}, "a batch of -1 requests"),
        ({"requests": [99]}, r"requests \[99\] were asked for: name some of 0 to 2"),
        ({"requests": [-1]}, r"requests \[-1\] were asked for"),
        ({"requests": []}, r"requests \[\] were asked for"),
        ({"requests": [1, 1]}, r"requests \[1, 1\] name one twice"),
        ({"control": Says(-1)}, "depth -1 was asked for, windows were recorded to depth 3: give 0 to 3"),
        ({"control": Says(2.5)}, "depth 2.5 was asked for"),
    ],
)
def test_what_cannot_be_asked(arguments, message):
    workload, scene = scene_of(windows_of(depth=3))
    with pytest.raises(UserError, match=message):
        simulate(workload, find_policy("specter"), scene, **{"new_tokens": 4} | arguments)


def test_a_scene_that_cannot_be():
    workload, scene = scene_of(windows_of(depth=3))
    with pytest.raises(UserError, match="depth -1 was asked for"):
        simulate(workload, find_policy("specter"), replace(scene, depth=-1), new_tokens=4)
    with pytest.raises(UserError, match="the workload has 3 MoE layers of 8 experts, tiny has 2 of 8: make it with"):
        simulate(workload, find_policy("lru"), scene_of(windows_of(layers=2))[1], new_tokens=4)


@pytest.mark.parametrize("slots", [0, -3])
@pytest.mark.parametrize("policy", [p for p in POLICIES.values() if p.slots in (equal_slots, separate_slots)],
                         ids=lambda policy: policy.id)  # fmt: skip
def test_no_slots_are_refused_by_every_policy_that_gets_no_others(policy, slots):
    workload, scene = scene_of(windows_for(policy), slots)
    with pytest.raises(UserError, match=f"a budget of {slots} slots per layer leaves layer 0 none"):
        simulate(workload, policy, scene, new_tokens=4)


def test_a_draft_of_its_own_weights_leaves_one_slot_where_there_is_one():
    _, scene = scene_of(windows_of(), slots=1)
    assert separate_slots(scene).tolist() == [1, 1, 1]
