"""K*: the depth at which measured rounds are cheapest per token on a machine one need not have. Simulated."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

import numpy as np

from specter_lab.errors import UserError
from specter_lab.experiments.lab.report import DepthRow, Estimate, Prediction
from specter_lab.experiments.specter.dense_vs_moe import plain_rounds
from specter_lab.measure import acceptance
from specter_lab.measure.acceptance import Residency
from specter_lab.measure.bootstrap import ratio_interval
from specter_lab.measure.speculate import Rounds
from specter_lab.measure.trace import Trace
from specter_lab.models.anatomy import Anatomy
from specter_lab.models.load import shown_name
from specter_lab.plan.depth import best_depth, round_costs, tpot_definitions
from specter_lab.plan.hardware import Profile
from specter_lab.plan.memory import footprints

PLAIN = 0  # depth
TPOT = "steady"  # of plan.depth's definitions: what a long text costs


def predict(
    rounds: Mapping[int, Rounds],
    plain: Trace,
    model: Anatomy,
    profile: Profile,
    *,
    memory_gb: float,
    new_tokens: int,
    seed: int,
) -> tuple[tuple[DepthRow, ...], Prediction]:
    """Price plain decoding and every depth, and find the cheapest.

    Args:
        rounds: depth -> rounds of the same requests.
        plain: routing of these requests' plain decoding.
        model: whose bytes and FLOPs count.
        memory_gb: GPU memory, 10^9 bytes.
        new_tokens: that every request was continued by.
        seed: of the bootstrap over requests.

    Raises:
        UserError: there is no room for a single expert slot per layer.
    """
    context_tokens = int(plain.position.max()) + 1
    slots = slots_that_fit(model, memory_gb, context_tokens)
    rows, tpots = [], {}
    for depth, found in sorted({PLAIN: plain_rounds(plain), **rounds}.items()):
        held = held_by(slots, found, model.num_experts)
        costs = round_costs(found, held, model, profile, slots)
        tpot = tpot_definitions(found, np.array([cost.total_ms for cost in costs]), new_tokens)[TPOT]
        accepted = None if depth == PLAIN else acceptance.measure(found, seed=seed)
        rows.append(
            DepthRow(
                depth=depth,
                accepted_per_checked=accepted and Estimate.of(accepted.per_checked),
                accepted_per_proposed=accepted and Estimate.of(accepted.per_proposed),
                tokens_per_round=accepted and Estimate.of(accepted.tokens_per_round),
                distinct_experts=float(held.distinct.mean()),
                resident_experts=float(held.resident.mean()),
                simulated_ms_per_token=Estimate.of(ratio_interval(tpot.ms, tpot.tokens, seed=seed)),
                simulated_h2d_mb_per_round=float(np.mean([cost.h2d_bytes for cost in costs])) / 1e6,
            )
        )
        tpots[depth] = tpot
    best = best_depth(tpots, seed=seed)
    half_gb = (bytes_beside_experts(model, context_tokens) + (model.num_experts // 2) * _slot_bytes(model)) / 1e9
    return tuple(rows), Prediction(
        profile.name, shown_name(model.name), memory_gb, slots, half_gb, best.depth, best.low, best.high
    )


def held_by(slots: int, rounds: Rounds, num_experts: int) -> Residency:
    """What is resident: an LRU cache of `slots` experts per layer, or every expert if all of them fit."""
    if slots < num_experts:
        return acceptance.residency(rounds, slots)
    distinct = rounds.needed.sum(axis=2).mean(axis=1)  # [N]
    return Residency(distinct, resident=distinct, predicted=np.zeros_like(distinct))


def slots_that_fit(model: Anatomy, memory_gb: float, context_tokens: int) -> int:
    """Expert slots per MoE layer (BF16) beside everything else: other weights, all INT4 experts, KV of the context.

    Raises:
        UserError: not even one.
    """
    if not isfinite(memory_gb):
        raise UserError(f"a memory of {memory_gb} GB is no size: give a number of GB")
    beside, slot_bytes = bytes_beside_experts(model, context_tokens), _slot_bytes(model)
    slots = int((memory_gb * 1e9 - beside) // slot_bytes)
    if slots < 1:
        raise UserError(f"{shown_name(model.name)} needs {(beside + slot_bytes) / 1e9:.3g} GB for its INT4 draft, its other "
                        f"weights and one expert slot per layer, and there are {memory_gb:g}: name more memory")  # fmt: skip
    return min(slots, model.num_experts)


def bytes_beside_experts(model: Anatomy, context_tokens: int) -> int:
    """GPU memory without a single expert slot: other weights, all INT4 experts, KV of the context."""
    return footprints(model, context_tokens=context_tokens, draft_experts=model.num_experts, target_experts=0)[-1].total


def _slot_bytes(model: Anatomy) -> int:
    """One BF16 expert slot in every MoE layer."""
    return model.moe_layers * model.expert_bytes
