"""What each piece of a round costs on a named machine: the numbers the simulator puts on its streams. All simulated.

The assumptions are those of `plan.cost`, layer by layer instead of pass by pass: a kernel takes max(bytes / bandwidth,
FLOPs / peak) or its measured time; a layer takes at least its operators' launch time; a draft step reads shared weights in
BF16 and top-k experts in INT4; an expert is copied whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from specter_lab.models.anatomy import Anatomy
from specter_lab.plan.cost import OPERATORS_PER_LAYER, draft_step_ms, every_token_ms
from specter_lab.plan.hardware import Profile
from specter_lab.plan.serve import PassCosts

EXPERT_OPERATORS = (
    6  # launches per expert and layer when experts are not fused: gather, three products, activation, add
)
READ_THROUGH = 0.85  # of a large copy's bandwidth: a kernel reading pinned memory (H200: 44-49 of 55 GB/s, measured)


@dataclass(frozen=True)
class StepCosts:
    """One model on one machine."""

    model: Anatomy
    profile: Profile
    fused: bool = True  # one launch for all experts of a layer (Specter, section SEE); else EXPERT_OPERATORS for each
    context_tokens: int = 0  # KV entries that every pass reads

    @cached_property
    def draft_step_ms(self) -> float:
        """One drafted token through the whole model."""
        unfused = 0 if self.fused else self.model.moe_layers * self.model.top_k * EXPERT_OPERATORS
        return draft_step_ms(self.model, self.profile, self.context_tokens) + unfused * self._launch_ms

    @cached_property
    def copy_ms(self) -> float:
        """One expert from host to GPU memory."""
        return self.profile.h2d_ms(self.model.expert_bytes)

    @property
    def expert_bytes(self) -> int:
        return self.model.expert_bytes

    def of_pass(self, tokens: int) -> PassCosts:
        """Everything that a target pass of `tokens` tokens is charged."""
        if tokens not in self._passes:
            self._passes[tokens] = self._of_pass(tokens)
        return self._passes[tokens]

    def _of_pass(self, tokens: int) -> PassCosts:
        model, profile, cpu = self.model, self.profile, self.profile.cpu
        kernels_ms = every_token_ms(model, profile, tokens, self.context_tokens) / model.layers
        expert_gb, token_tflop = model.expert_bytes * 1e-9, 2 * model.parameters_per_expert * 1e-12
        measured_ms = profile.measured.get(("expert", model.name, tokens))
        return PassCosts(
            layer_ms=max(kernels_ms, OPERATORS_PER_LAYER * self._launch_ms),
            read_ms=expert_gb / profile.memory_bandwidth_gb_s * 1e3 if measured_ms is None else measured_ms / model.moe_layers,
            flop_ms=token_tflop / profile.bf16_tflop_s * 1e3,
            launch_ms=0.0 if self.fused else EXPERT_OPERATORS * self._launch_ms,
            copy_ms=self.copy_ms,
            read_through_ms=expert_gb / (READ_THROUGH * profile.h2d.gb_s[-1]) * 1e3,
            cpu_read_ms=expert_gb / cpu.memory_bandwidth_gb_s * 1e3,
            cpu_flop_ms=token_tflop / cpu.bf16_tflop_s * 1e3,
        )  # fmt: skip

    @cached_property
    def _passes(self) -> dict[int, PassCosts]:
        return {}

    @property
    def _launch_ms(self) -> float:
        return self.profile.launch_us * 1e-3
