"""Transformers and vLLM as they appear in every table: layers are offloaded, not experts, so each is a closed form.

How much time they take hangs on what one assumes about host memory. Each assumption is a system with a name of its own, and
a name means the same in every experiment. The paper's "Transformers" and "vLLM" are judged on the first of each: Accelerate's
copies come from pageable memory, vLLM's from pinned memory with every offloaded weight streamed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from specter_lab.models.anatomy import Anatomy
from specter_lab.plan.cost import verify_ms
from specter_lab.plan.hardware import Profile
from specter_lab.plan.layer_offload import PAGEABLE_GB_S, transformers_ms, vllm_ms


@dataclass(frozen=True)
class LayerSystem:
    """One system under one assumption; its times are simulated."""

    id: str
    title: str
    token_ms: Callable[[Anatomy, Profile, int, int], float]  # model, machine, budget bytes, context tokens -> ms
    pageable: bool = False  # copies from pageable memory

    def ms(
        self, model: Anatomy, profile: Profile, budget_bytes: int, context_tokens: int, *, tokens: int = 1,
        distinct_experts: float | None = None,
    ) -> float:  # fmt: skip
        """One step of `tokens` requests: what it moves serves all of them, computing is charged for each."""
        ms = self.token_ms(model, profile, budget_bytes, context_tokens)
        if tokens == 1:
            return ms
        one_ms = verify_ms(model, profile, 1, model.top_k, context_tokens)
        return ms - one_ms + verify_ms(model, profile, tokens, distinct_experts, context_tokens)

    def moved_mb(self, model: Anatomy, profile: Profile, budget_bytes: int, context_tokens: int) -> float:
        """What one token moves."""
        pinned_gb_s = profile.h2d.gb_s[-1]
        gb_s = min(PAGEABLE_GB_S, pinned_gb_s) if self.pageable else pinned_gb_s
        moving_ms = self.token_ms(model, profile, budget_bytes, context_tokens) - verify_ms(
            model, profile, 1, model.top_k, context_tokens
        )
        return moving_ms * gb_s  # ms x GB/s = MB


TRANSFORMERS, PINNED = "transformers", "transformers-pinned"
LAYER_SYSTEMS = {
    system.id: system
    for system in (
        LayerSystem(TRANSFORMERS, "Transformers, layer offload", transformers_ms, pageable=True),
        LayerSystem(PINNED, "Transformers, pinned memory", partial(transformers_ms, pinned=True)),
        LayerSystem("vllm", "vLLM, CPU offload", vllm_ms),
        LayerSystem("vllm-in-place", "vLLM, experts read in place", partial(vllm_ms, only_used=True)),
    )
}
