"""What a speculative round costs on a named machine: a stated model. Its outputs are simulated, and labelled so.

    model = anatomy_of("Qwen1.5-MoE-A2.7B")          # bytes and FLOPs of the model whose speed is asked for
    profile = read_profile("a100-40gb-pcie4")
    cost = round_cost(model, profile, depth=8, distinct_experts=26.1, resident_experts=9.0, slots=15)
    tpot_ms(cost, tokens_per_round=7.4)              # accepted drafted tokens + 1

`distinct_experts` (used per MoE layer by the K+1 verified tokens) and `resident_experts` (how many of those lie in the
slots when the round starts) are measured, on the model itself or on a small one with the same routing geometry.
Depth 0 is plain decoding: no draft, one verified token, every miss waited for.

Assumptions:

1. A pass reads each weight it needs once. Weights that every token uses and routed experts are two rooflines, each
   max(bytes / bandwidth, FLOPs / peak) at the data sheet's numbers, one after the other. The KV cache is read with the
   former; the FLOPs of attention scores are left out (contexts of some hundred tokens).
2. Launching is asynchronous: a pass takes at least OPERATORS_PER_LAYER x layers x launch time. At batch 1 this, not
   bandwidth, is what a draft step in eager PyTorch costs.
3. A draft step computes one token with BF16 shared weights and top-k INT4 experts per layer (all resident), read as
   codes and scales (Specter, sections SIC and SEE); of a tree all new nodes at once, with the experts they use together.
4. Missing experts are copied whole and one by one; the link does nothing else.
5. Prefetching starts after COLD_START of the draft steps and is free until the draft ends (PIO). It brings what the
   draft predicts (`predicted_share`), as far as slots are free of experts already in use; the verification waits for
   all the rest. Evictions cost nothing: host copies are never written back.
6. Verification computes after the copies, not beside them: an upper bound of the exposed time.

Where the profile has a measured time (`[[measured]]`: operation, model, tokens, ms), it replaces the roofline at
exactly that number of tokens. Operations, each over all layers of one pass:

    every_token    the weights that every token uses, context empty
    expert         one BF16 expert in every MoE layer, `tokens` tokens in the pass
    draft_step     a whole draft step with its launches, context empty (tokens = 1)
"""

from __future__ import annotations

from dataclasses import dataclass

from specter_lab.compress.int4 import int4_expert_bytes
from specter_lab.models.anatomy import Anatomy
from specter_lab.models.geometry import BF16_BYTES
from specter_lab.plan.hardware import Profile
from specter_lab.plan.lookahead import COLD_START

OPERATORS_PER_LAYER = 50  # eager decoder layer: two norms, projections, rotary, attention, router, experts, shared MLP


@dataclass(frozen=True)
class RoundCost:
    """Times of one round, simulated."""

    draft_ms: float  # K draft steps
    h2d_bytes: float
    h2d_ms: float  # all copies
    verify_ms: float  # compute of the verification
    exposed_ms: float  # the part of h2d_ms that nothing hides

    @property
    def total_ms(self) -> float:
        return self.draft_ms + self.exposed_ms + self.verify_ms


def round_cost(
    model: Anatomy,
    profile: Profile,
    *,
    depth: int,
    distinct_experts: float,
    resident_experts: float,
    slots: float,
    predicted_share: float = 1.0,
    context_tokens: int = 0,
) -> RoundCost:
    """Cost of drafting K = `depth` tokens and verifying K+1.

    Args:
        distinct_experts: experts per MoE layer that the K+1 tokens use.
        resident_experts: those of them that are in the layer's slots when the round starts.
        slots: expert slots per MoE layer; prefetched experts and residents in use share them.
        predicted_share: share of the missing experts that the draft's routing names.
        context_tokens: KV entries that every pass reads.

    Raises:
        ValueError: more residents than distinct experts or slots, or a negative depth.
    """
    if not 0 <= resident_experts <= min(distinct_experts, slots) + 1e-9 or depth < 0:
        raise ValueError(f"{resident_experts} resident of {distinct_experts} experts, {slots} slots, depth {depth}")
    missing = distinct_experts - resident_experts
    prefetched = prefetched_experts(depth, missing, slots - resident_experts, predicted_share)
    copy_ms = model.moe_layers * profile.h2d_ms(model.expert_bytes)  # one expert in every MoE layer
    draft_ms = depth * draft_step_ms(model, profile, context_tokens)
    exposed_ms = max(0.0, prefetched * copy_ms - (1 - COLD_START) * draft_ms) + (missing - prefetched) * copy_ms
    return RoundCost(
        draft_ms=draft_ms,
        h2d_bytes=model.moe_layers * missing * model.expert_bytes,
        h2d_ms=missing * copy_ms,
        verify_ms=verify_ms(model, profile, depth + 1, distinct_experts, context_tokens),
        exposed_ms=exposed_ms,
    )


def prefetched_experts(depth: int, missing: float, free_slots: float, predicted_share: float = 1.0) -> float:
    """Of the `missing` experts per MoE layer, those that are copied while the draft writes (assumption 5)."""
    return min(predicted_share * missing, free_slots) if depth else 0.0


def tpot_ms(cost: RoundCost, tokens_per_round: float) -> float:
    """Steady-state milliseconds per token; `tokens_per_round` counts accepted drafted tokens and the bonus token."""
    return cost.total_ms / tokens_per_round


def draft_step_ms(
    model: Anatomy,
    profile: Profile,
    context_tokens: int = 0,
    tokens: int = 1,
    distinct_experts: float | None = None,
) -> float:
    """`tokens` tokens in one pass through shared BF16 weights and the INT4 experts per layer that they use (default: top-k)."""
    if (measured_ms := profile.measured.get(("draft_step", model.name, tokens))) is not None:
        return measured_ms + _context_ms(model, profile, context_tokens)
    experts = model.top_k if distinct_experts is None else distinct_experts
    expert_bytes = model.moe_layers * experts * int4_expert_bytes(model.hidden_size, model.expert_width)
    experts_ms = roofline_ms(profile, expert_bytes, _expert_flops(model, tokens))
    return max(every_token_ms(model, profile, tokens, context_tokens) + experts_ms, launches_ms(model, profile))


def verify_ms(model: Anatomy, profile: Profile, tokens: int, distinct_experts: float, context_tokens: int = 0) -> float:
    """`tokens` tokens through the target in one pass that reads `distinct_experts` BF16 experts per MoE layer."""
    kernels_ms = verify_kernels_ms(model, profile, tokens, distinct_experts, context_tokens)
    return max(kernels_ms, launches_ms(model, profile))


def verify_kernels_ms(
    model: Anatomy, profile: Profile, tokens: int, distinct_experts: float, context_tokens: int = 0
) -> float:
    """The GPU's own part of `verify_ms`: what it takes when nobody waits for the host."""
    if (measured_ms := profile.measured.get(("expert", model.name, tokens))) is not None:
        experts_ms = distinct_experts * measured_ms
    else:
        expert_bytes = model.moe_layers * distinct_experts * model.expert_bytes
        experts_ms = roofline_ms(profile, expert_bytes, _expert_flops(model, tokens))
    return every_token_ms(model, profile, tokens, context_tokens) + experts_ms


def launches_ms(model: Anatomy, profile: Profile) -> float:
    """What the host needs to launch one pass."""
    return model.layers * OPERATORS_PER_LAYER * profile.launch_us * 1e-3


def every_token_ms(model: Anatomy, profile: Profile, tokens: int, context_tokens: int) -> float:
    """Kernels of everything but routed experts, for a pass of `tokens` tokens."""
    if (measured_ms := profile.measured.get(("every_token", model.name, tokens))) is not None:
        return measured_ms + _context_ms(model, profile, context_tokens)
    every_token_bytes = model.every_token_parameters * BF16_BYTES + context_tokens * model.kv_bytes_per_token
    return roofline_ms(profile, every_token_bytes, 2 * tokens * model.every_token_parameters)


def _context_ms(model: Anatomy, profile: Profile, context_tokens: int) -> float:
    return roofline_ms(profile, context_tokens * model.kv_bytes_per_token, 0)


def _expert_flops(model: Anatomy, tokens: int) -> int:
    return 2 * tokens * model.moe_layers * model.top_k * model.parameters_per_expert


def roofline_ms(profile: Profile, num_bytes: float, flops: float) -> float:
    """Time of a kernel that the slower of reading and computing decides."""
    return max(num_bytes / profile.memory_bandwidth_gb_s * 1e-6, flops / profile.bf16_tflop_s * 1e-9)
