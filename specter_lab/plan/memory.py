"""How much GPU memory a draft and a target need, together and apart (Specter, memory at 12K context).

Specter's draft is the target with INT4 experts, so everything else can be held once. Four levels, each sharing one part
more than the one before: nothing, the shared experts, all other parameters (embeddings, attention, norms, routers), the
KV cache. Routed experts are never shared: the draft's are INT4, the target's BF16.

*How many* routed experts are counted decides the answer, so the caller says it.
"""

from __future__ import annotations

from dataclasses import dataclass

from specter_lab.compress.int4 import int4_expert_bytes
from specter_lab.models.anatomy import Anatomy
from specter_lab.models.geometry import BF16_BYTES

PARTS = ("shared experts", "other parameters", "KV cache")  # in the order in which they are shared
LEVELS = ("independent", *(f"+ {part}" for part in PARTS))


@dataclass(frozen=True)
class Footprint:
    """Bytes that only the draft, only the target and both use."""

    level: str  # of LEVELS
    draft: int
    target: int
    shared: int

    @property
    def total(self) -> int:
        return self.draft + self.target + self.shared


def footprints(
    model: Anatomy, *, context_tokens: int, draft_experts: int, target_experts: int
) -> tuple[Footprint, ...]:
    """The footprint at every level of sharing.

    Args:
        context_tokens: tokens in the KV cache.
        draft_experts: INT4 routed experts counted per MoE layer.
        target_experts: BF16 routed experts counted per MoE layer.
    """
    draft_pool = model.moe_layers * draft_experts * int4_expert_bytes(model.hidden_size, model.expert_width)
    target_pool = model.moe_layers * target_experts * model.expert_bytes
    sizes = (
        model.shared_experts * BF16_BYTES,
        model.other_parameters * BF16_BYTES,
        context_tokens * model.kv_bytes_per_token,
    )
    return tuple(
        Footprint(level, draft_pool + sum(sizes[i:]), target_pool + sum(sizes[i:]), sum(sizes[:i]))
        for i, level in enumerate(LEVELS)
    )
