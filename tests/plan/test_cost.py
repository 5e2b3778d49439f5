"""The cost model: by hand, at its limits, and near the times the paper reports."""

from dataclasses import replace

import pytest
import torch

from specter_lab.compress.int4 import int4_expert_bytes, quantize_bank
from specter_lab.models.anatomy import anatomy_of
from specter_lab.models.experts import ExpertBank
from specter_lab.plan.cost import (
    COLD_START,
    OPERATORS_PER_LAYER,
    draft_step_ms,
    launches_ms,
    round_cost,
    tpot_ms,
    verify_kernels_ms,
    verify_ms,
)  # fmt: skip
from specter_lab.plan.hardware import read_profile
from specter_lab.plan.step_costs import StepCosts

QWEN, PHI = anatomy_of("Qwen1.5-MoE-A2.7B"), anatomy_of("Phi-3.5-MoE")
A100 = read_profile("a100-40gb-pcie4")
NO_LAUNCHES = replace(A100, launch_us=0.0)


def cost(model=QWEN, profile=A100, **changes):
    usual = {"depth": 8, "distinct_experts": 20.0, "resident_experts": 9.0, "slots": 15}
    return round_cost(model, profile, **usual | changes)


def test_int4_bytes_are_those_of_real_tensors():
    bank = ExpertBank(0, torch.randn(3, 64, 256), torch.randn(3, 64, 256), torch.randn(3, 256, 64))
    packed = quantize_bank(bank)
    stored = sum(p.packed.nbytes + p.scales.nbytes for p in (packed.gate, packed.up, packed.down))
    assert stored == 3 * int4_expert_bytes(hidden_size=256, expert_width=64)
    assert int4_expert_bytes(2048, 1408) * 8 / QWEN.parameters_per_expert == 4.125  # FP16 scale per 128


def test_a_pass_at_batch_1_is_its_bytes_over_the_bandwidth():
    shared = QWEN.every_token_parameters * 2
    int4 = 24 * 4 * int4_expert_bytes(2048, 1408)
    assert draft_step_ms(QWEN, NO_LAUNCHES) == pytest.approx((shared + int4) / 1555e6)
    bf16 = 24 * 20 * QWEN.expert_bytes
    assert verify_ms(QWEN, NO_LAUNCHES, 9, 20) == pytest.approx((shared + bf16) / 1555e6)
    longer = verify_ms(QWEN, NO_LAUNCHES, 9, 20, context_tokens=1000) - verify_ms(QWEN, NO_LAUNCHES, 9, 20)
    assert longer == pytest.approx(1000 * QWEN.kv_bytes_per_token / 1555e6)


def test_many_tokens_are_bound_by_flops():
    tokens = 10_000
    flops = 2 * tokens * QWEN.active_parameters
    assert verify_ms(QWEN, NO_LAUNCHES, tokens, 60) == pytest.approx(flops / 312e9)


def test_a_pass_of_the_draft_over_several_tokens_reads_the_experts_that_they_use():
    one, several = draft_step_ms(QWEN, NO_LAUNCHES), draft_step_ms(QWEN, NO_LAUNCHES, 0, 3, 7.5)
    assert several - one == pytest.approx(24 * 3.5 * int4_expert_bytes(2048, 1408) / 1555e6)
    assert draft_step_ms(QWEN, NO_LAUNCHES, 0, 1, 4) == one
    costs = StepCosts(QWEN, NO_LAUNCHES, fused=False)
    assert costs.draft_pass_ms(1, 4) == costs.draft_step_ms and costs.draft_pass_ms(3, 7.5) == several


def test_turns_of_the_host_cost_what_was_measured_or_nothing():
    costs = StepCosts(QWEN, A100)
    assert costs.of_pass(9).turn_ms == 0.0 < costs.of_pass(9).routing_ms
    measured = replace(costs, told_ms=0.065, turn_ms=0.08).of_pass(9)
    assert measured == costs.of_pass(9)._replace(turn_ms=0.08, routing_ms=0.065)


def test_a_short_pass_waits_for_its_launches():
    assert draft_step_ms(QWEN, A100) == launches_ms(QWEN, A100) == 24 * OPERATORS_PER_LAYER * 10e-3
    assert verify_kernels_ms(QWEN, A100, 1, 4) < launches_ms(QWEN, A100) == verify_ms(QWEN, A100, 1, 4)
    assert verify_ms(QWEN, A100, 17, 60) == verify_kernels_ms(QWEN, A100, 17, 60)


def test_copies_are_hidden_as_far_as_the_draft_and_the_slots_allow():
    one = 24 * A100.h2d_ms(QWEN.expert_bytes)
    found = cost()
    assert found.h2d_ms == pytest.approx(11 * one)
    assert found.h2d_bytes == pytest.approx(11 * 24 * QWEN.expert_bytes)
    free = (1 - COLD_START) * found.draft_ms  # 6 of the 11 fit beside the residents
    assert found.exposed_ms == pytest.approx(max(0, 6 * one - free) + 5 * one)
    assert found.total_ms == pytest.approx(found.draft_ms + found.exposed_ms + found.verify_ms)
    assert cost(predicted_share=0.0).exposed_ms == pytest.approx(11 * one)
    half = cost(predicted_share=0.5)
    assert half.exposed_ms == pytest.approx(max(0, 5.5 * one - free) + 5.5 * one)
    assert cost(distinct_experts=9.0).h2d_ms == cost(distinct_experts=9.0).exposed_ms == 0


def test_plain_decoding_has_no_draft_and_hides_nothing():
    found = cost(depth=0, distinct_experts=4.0, resident_experts=1.0)
    assert found.draft_ms == 0
    assert found.exposed_ms == found.h2d_ms == pytest.approx(3 * 24 * A100.h2d_ms(QWEN.expert_bytes))
    assert tpot_ms(found, tokens_per_round=1) == found.total_ms
    assert tpot_ms(cost(), tokens_per_round=8) == pytest.approx(cost().total_ms / 8)


def test_more_work_never_costs_less():
    assert cost(distinct_experts=21.0).total_ms > cost().total_ms > cost(resident_experts=10.0).total_ms
    assert cost(depth=9).draft_ms > cost().draft_ms
    assert cost(predicted_share=0.5).total_ms >= cost().total_ms


def test_impossible_rounds():
    for wrong in (
        {"resident_experts": 16.0},
        {"resident_experts": 21.0, "slots": 30},
        {"resident_experts": -1.0},
        {"depth": -1},
    ):
        with pytest.raises(ValueError, match="slots"):
            cost(**wrong)


def test_near_the_papers_times():
    """Specter: Phi copies for 2089 ms in a round of K = 16, 1621 of it exposed; Mixtral is 98.9 % copies (MoE-SpeQ)."""
    phi = cost(PHI, depth=16, distinct_experts=12.5, resident_experts=1.4, slots=2)
    assert phi.h2d_ms == pytest.approx(2089, rel=0.15)
    assert phi.exposed_ms == pytest.approx(1621, rel=0.4)  # slots for two: the model can hide less than the paper did
    mixtral = anatomy_of("Mixtral-8x7B")
    plain = cost(mixtral, depth=0, distinct_experts=2.0, resident_experts=0.0, slots=1)
    assert plain.h2d_ms / plain.total_ms == pytest.approx(0.989, abs=0.01)


def test_measured_times_replace_the_roofline_where_there_are_any():
    slow = {("draft_step", QWEN.name, 1): 30.0, ("every_token", QWEN.name, 9): 11.0, ("expert", QWEN.name, 9): 2.0}
    measured = replace(NO_LAUNCHES, measured=slow)
    assert draft_step_ms(QWEN, measured) == 30.0
    kv_ms = 1000 * QWEN.kv_bytes_per_token / 1555e6
    assert draft_step_ms(QWEN, measured, context_tokens=1000) == pytest.approx(30.0 + kv_ms)
    assert verify_ms(QWEN, measured, 9, 20) == pytest.approx(11.0 + 20 * 2.0)
    assert verify_ms(QWEN, measured, 9, 20, context_tokens=1000) == pytest.approx(11.0 + 20 * 2.0 + kv_ms)
    found, usual = cost(profile=measured), cost(profile=NO_LAUNCHES)
    assert (found.draft_ms, found.h2d_ms) == (8 * 30.0, usual.h2d_ms)
    assert verify_ms(QWEN, measured, 10, 20) == verify_ms(QWEN, NO_LAUNCHES, 10, 20)  # other counts: the roofline
    assert draft_step_ms(PHI, measured) == draft_step_ms(PHI, NO_LAUNCHES)  # other models too
