"""From a GPU memory budget in bytes to expert slots, and back.

    weights        everything but routed experts, BF16: the target's, which the draft shares
    INT4 pool      all routed experts of the draft, when the policy drafts with INT4
    own copies     the draft's own other weights and KV cache, when the policy shares nothing
    KV cache       of `batch` requests at a context
    workspace      context, libraries, activations (assumed)
    slots          what is left: whole BF16 experts, equally many per MoE layer

Where GPU and host share one memory (Jetson), the host's copies of the experts lie in it too, as many as there is room for
beside the rest; the others are read from disk whenever they are copied (`StepCosts.placed`).

GB are 10^9 bytes. In the paper's settings there is more room than its slots take: at 20/16 GB (Qwen), 40/32 GB (Phi) and
24/18 GB (DeepSeek) Specter has 15/8, 2/1 and 16/4 slots; `slots_for` finds what tests/plan/test_budget.py lists.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from specter_lab.compress.int4 import int4_expert_bytes
from specter_lab.errors import UserError
from specter_lab.models.anatomy import Anatomy
from specter_lab.models.geometry import BF16_BYTES
from specter_lab.plan.policy import Policy, Scene

WORKSPACE_BYTES = 512 * 2**20  # assumed: CUDA context and libraries about 400 MiB, activations of one window the rest


@dataclass(frozen=True)
class Fixed:
    """Bytes that are taken before there is any slot."""

    weights: int
    int4_pool: int
    own_copies: int
    kv_cache: int
    workspace: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def fixed_bytes(policy: Policy, model: Anatomy, context_tokens: int, batch: int = 1) -> Fixed:
    """What a policy's system needs beside its slots, for `batch` requests of `context_tokens` tokens each."""
    weights = (model.shared_experts + model.other_parameters) * BF16_BYTES
    kv = batch * context_tokens * model.kv_bytes_per_token
    pool = model.moe_layers * model.num_experts * int4_expert_bytes(model.hidden_size, model.expert_width)
    return Fixed(
        weights=weights,
        int4_pool=pool if policy.draft == "int4" else 0,
        own_copies=0 if policy.draft is None or policy.shares_weights else weights + kv,
        kv_cache=kv,
        workspace=WORKSPACE_BYTES,
    )


def bytes_for(policy: Policy, model: Anatomy, slots_per_layer: int, context_tokens: int, batch: int = 1) -> int:
    """The budget that just holds so many slots per MoE layer."""
    return fixed_bytes(policy, model, context_tokens, batch).total + slots_per_layer * _layer_bytes(model)


def held_bytes(policy: Policy, scene: Scene, context_tokens: int, batch: int = 1) -> dict[str, int]:
    """What a policy's system holds in the GPU's memory in this scene, by part; the sum must not exceed it.

    In a memory that the host shares, the host's copies of the experts are a part: as many as find room beside the others.
    """
    costs, fixed = scene.costs, asdict(fixed_bytes(policy, scene.costs.model, context_tokens, batch))
    parts = {name.replace("_", " "): size for name, size in fixed.items() if size}
    parts["expert slots"] = int(policy.slots(scene).sum()) * costs.model.expert_bytes
    if costs.profile.unified_memory:
        parts["host copies"] = costs.placed(sum(parts.values())).disk.first * _layer_bytes(costs.model)
    return parts


def gpu_bytes(policy: Policy, scene: Scene, slots: np.ndarray, batch: int = 1) -> int:
    """What a policy's system holds on the GPU in this scene, with slots [L]."""
    fixed = fixed_bytes(policy, scene.costs.model, scene.costs.context_tokens, batch)
    return fixed.total + int(slots.sum()) * scene.costs.expert_bytes


def slots_for(policy: Policy, model: Anatomy, budget_bytes: int, context_tokens: int, batch: int = 1) -> int:
    """Slots per MoE layer that a budget holds, at most all experts.

    Raises:
        UserError: no bytes at all, or not one slot per layer fits; with the numbers, and what could be given up.
    """
    if budget_bytes <= 0:
        raise UserError(f"a budget of {budget_bytes} bytes is none: give what the GPU may hold, in bytes")
    fixed = fixed_bytes(policy, model, context_tokens, batch)
    slots = (budget_bytes - fixed.total) // _layer_bytes(model)
    if slots < 1:
        raise UserError(_refusal(policy, model, budget_bytes, fixed))
    return min(int(slots), model.num_experts)


def scene_within(scene: Scene, policy: Policy, budget_bytes: int, context_tokens: int, batch: int = 1) -> Scene:
    """The scene in which `policy` has as many slots in all as the budget holds, whatever its own rule makes of a scene's.

    Raises:
        UserError: not one slot per layer fits.
    """
    wanted = slots_for(policy, scene.costs.model, budget_bytes, context_tokens, batch) * scene.layers
    low, high = 1 - scene.pool_slots, 2 * scene.num_experts  # more slots in the scene never give fewer
    while low < high:
        middle = (low + high + 1) // 2
        fits = policy.slots(replace(scene, slots_per_layer=middle)).sum() <= wanted
        low, high = (middle, high) if fits else (low, middle - 1)
    return replace(scene, slots_per_layer=low)


def _layer_bytes(model: Anatomy) -> int:
    return model.moe_layers * model.expert_bytes


def _refusal(policy: Policy, model: Anatomy, budget_bytes: int, fixed: Fixed) -> str:
    parts = ", ".join(f"{name.replace('_', ' ')} {size / 1e9:.2f}" for name, size in asdict(fixed).items() if size)
    needed = fixed.total + _layer_bytes(model)
    give_up = {
        "a draft of its own weights": fixed.own_copies,
        "the INT4 draft, as lru-s or adapmoe do": fixed.int4_pool,
        "context": fixed.kv_cache,
    }
    worth = {what: f"{size / 1e9:.2f}" for what, size in give_up.items()}
    options = "; ".join(f"{what} ({gb} GB)" for what, gb in worth.items() if float(gb))
    return (
        f"{budget_bytes / 1e9:.2f} GB do not hold one expert slot in each of the {model.moe_layers} MoE layers of "
        f"{model.name} under '{policy.id}', which takes {needed / 1e9:.2f} GB ({parts}, slots {_layer_bytes(model) / 1e9:.2f}): "
        f"give {(needed - budget_bytes) / 1e9:.2f} GB more" + (f", or give up {options}" if options else "")
    )
