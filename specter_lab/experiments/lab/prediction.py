"""K*: the depth at which measured rounds are cheapest per token on a machine one need not have. Simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from specter_lab.errors import UserError
from specter_lab.experiments.lab.report import DepthRow, Estimate, Prediction
from specter_lab.measure import acceptance
from specter_lab.measure.bootstrap import resample_counts
from specter_lab.measure.locality import lru_residents
from specter_lab.measure.speculate import Rounds
from specter_lab.measure.trace import Trace
from specter_lab.models.anatomy import Anatomy
from specter_lab.models.geometry import BF16_BYTES
from specter_lab.plan.cost import RoundCost, int4_expert_bytes, round_cost, tpot_ms
from specter_lab.plan.hardware import Profile

RESAMPLES = 500


@dataclass(frozen=True)
class _Needs:
    """What rounds of one depth need, summed over each request's rounds; arrays [R]."""

    rounds: np.ndarray
    tokens: np.ndarray  # accepted, and the target's own
    distinct: np.ndarray  # experts per MoE layer
    resident: np.ndarray
    predicted: np.ndarray


def predict(
    rounds: Mapping[int, Rounds],
    plain: Trace,
    model: Anatomy,
    profile: Profile,
    *,
    memory_gb: float,
    context_tokens: int,
    seed: int,
) -> tuple[tuple[DepthRow, ...], Prediction]:
    """Price every depth, and plain decoding, and find the cheapest.

    Args:
        rounds: depth -> rounds of the same requests.
        plain: routing of these requests' plain decoding.
        model: whose bytes and FLOPs count.
        memory_gb: GPU memory, 10^9 bytes.
        context_tokens: KV entries that a pass reads.
        seed: of the bootstrap over requests.

    Raises:
        UserError: there is no room for a single expert slot per layer.
    """
    slots = slots_that_fit(model, memory_gb, context_tokens)
    needs = {0: _plain_needs(plain, slots)} | {depth: _round_needs(rounds[depth], slots) for depth in sorted(rounds)}
    drawn = resample_counts(len(plain.request_ids), RESAMPLES, seed)  # [B, R]

    def cost(depth: int, count: float, _tokens: float, distinct: float, resident: float, predicted: float) -> RoundCost:
        missing = distinct - resident
        return round_cost(
            model, profile, depth=depth, distinct_experts=distinct / count, resident_experts=resident / count,
            slots=slots, predicted_share=predicted / missing if missing > 0 else 1.0, context_tokens=context_tokens,
        )  # fmt: skip

    rows, resampled = [], []
    for depth, need in needs.items():
        sums = np.stack([need.rounds, need.tokens, need.distinct, need.resident, need.predicted], axis=1)  # [R, 5]
        total = sums.sum(axis=0)
        times = np.array([_ms_per_token(cost, depth, row) for row in drawn @ sums])  # [B]
        low, high = np.quantile(times, (0.025, 0.975))
        found = acceptance.measure(rounds[depth], seed=seed) if depth else None
        rows.append(
            DepthRow(
                depth=depth,
                accepted_per_checked=found and Estimate.of(found.per_checked),
                accepted_per_proposed=found and Estimate.of(found.per_proposed),
                tokens_per_round=found and Estimate.of(found.tokens_per_round),
                distinct_experts=float(total[2] / total[0]),
                resident_experts=float(total[3] / total[0]),
                simulated_ms_per_token=Estimate(_ms_per_token(cost, depth, total), float(low), float(high), len(sums)),
                simulated_h2d_mb_per_round=cost(depth, *total).h2d_bytes / 1e6,
            )
        )
        resampled.append(times)
    best = int(np.argmin([row.simulated_ms_per_token.value for row in rows]))
    share = float((np.argmin(resampled, axis=0) == best).mean())
    return tuple(rows), Prediction(profile.name, model.name, memory_gb, slots, rows[best].depth, share)


def _ms_per_token(cost: Callable[..., RoundCost], depth: int, sums: np.ndarray) -> float:
    return float(tpot_ms(cost(depth, *sums), sums[1] / sums[0]))


def slots_that_fit(model: Anatomy, memory_gb: float, context_tokens: int) -> int:
    """Expert slots per MoE layer (BF16) beside everything else: other weights, all INT4 experts, KV of the context.

    Raises:
        UserError: not even one.
    """
    int4_pool = model.moe_layers * model.num_experts * int4_expert_bytes(model.hidden_size, model.expert_width)
    fixed = (model.parameters - model.routed_experts) * BF16_BYTES + int4_pool
    fixed += context_tokens * model.kv_bytes_per_token
    slot_bytes = model.moe_layers * model.expert_bytes
    slots = int((memory_gb * 1e9 - fixed) // slot_bytes)
    if slots < 1:
        raise UserError(f"{model.name} needs {(fixed + slot_bytes) / 1e9:.3g} GB for its INT4 draft, its other weights "
                        f"and one expert slot per layer, and there are {memory_gb:g}: name more memory")  # fmt: skip
    return min(slots, model.num_experts)


def _round_needs(rounds: Rounds, slots: int) -> _Needs:
    held = acceptance.residency(rounds, slots)

    def per_request(values: np.ndarray) -> np.ndarray:
        return np.bincount(rounds.request, weights=values)

    return _Needs(
        np.bincount(rounds.request), per_request(rounds.accepted + 1), per_request(held.distinct),
        per_request(held.resident), per_request(held.predicted),
    )  # fmt: skip


def _plain_needs(trace: Trace, slots: int) -> _Needs:
    """One token per round, top-k experts per layer, nothing known in advance."""
    held = lru_residents(trace, window=1, slots=slots)
    layers = len(trace.layers)
    distinct = held.needed / layers
    rounds = distinct / trace.top_k
    return _Needs(rounds, rounds, distinct, held.found / layers, np.zeros_like(rounds))
