"""What each piece of a round costs on a named machine: the numbers the simulator puts on its streams. All simulated.

The assumptions are those of `plan.cost`, layer by layer instead of pass by pass: a kernel takes max(bytes / bandwidth,
FLOPs / peak) or its measured time; a layer takes at least its operators' launch time; a draft step reads shared weights in
BF16 and top-k experts in INT4; an expert is copied whole.

Routing reaches the host as one small copy per layer of a target pass, and one per drafted token. Where an engine was there to
measure (`told_ms`), that takes what a layer with a miss takes longer than one without, beside the copies; every turn in which
slots are used again costs `turn_ms` (`plan.serve`). Where host memory does not
hold all routed experts, it holds the first ones of every layer, whoever they are, and the others are read from disk each
time: experts have no order, so this is neither the best nor the worst choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from specter_lab.models.anatomy import Anatomy
from specter_lab.plan.cost import OPERATORS_PER_LAYER, draft_step_ms, every_token_ms
from specter_lab.plan.hardware import Profile
from specter_lab.plan.serve import Disk, PassCosts

EXPERT_OPERATORS = (
    6  # launches per expert and layer when experts are not fused: gather, three products, activation, add
)
USE_BYTES = 12  # one token's use of one expert, as the host is told it: 64-bit number, 32-bit weight
HOST_SYSTEM_BYTES = 4 * 2**30  # assumed: of host memory, what everything but experts takes
READ_THROUGH = 0.85  # of a large copy's bandwidth: a kernel reading pinned memory (H200: 44-49 of 55 GB/s, measured)


@dataclass(frozen=True)
class Transport:
    """How a copied expert crosses the link. What a kernel reads from host memory by itself crosses it as it is."""

    bits: float = 16.0  # of a BF16 weight
    restore_gb_s: float = inf  # BF16 out of the kernel that puts weights together again; charged after every copy


@dataclass(frozen=True)
class StepCosts:
    """One model on one machine."""

    model: Anatomy
    profile: Profile
    fused: bool = True  # one launch for all experts of a layer (Specter, section SEE); else EXPERT_OPERATORS for each
    context_tokens: int = 0  # KV entries that every pass reads
    on_host: int | None = None  # experts of every layer that host memory holds; None: all
    transport: Transport = Transport()
    told_ms: float | None = None  # the host hears of a miss, as measured; None: as long as a copy of the routing
    turn_ms: float = 0.0  # see `PassCosts.turn_ms`

    def placed(self, gpu_bytes: int) -> StepCosts:
        """The same, with as many experts in host memory as it has room for beside its system; the others stay on disk.

        Args:
            gpu_bytes: held on the GPU; counts where GPU and host share one memory.
        """
        room = self.profile.host_bytes_beside(gpu_bytes) - HOST_SYSTEM_BYTES
        held = int(room // (self.model.moe_layers * self.model.expert_bytes))
        return replace(self, on_host=min(max(0, held), self.model.num_experts))

    @cached_property
    def draft_step_ms(self) -> float:
        """One drafted token through the whole model."""
        return self.draft_pass_ms(1, self.model.top_k)

    def draft_pass_ms(self, tokens: int, distinct_experts: float) -> float:
        """One pass of the draft over `tokens` tokens that use `distinct_experts` INT4 experts per MoE layer."""
        unfused = 0 if self.fused else self.model.moe_layers * distinct_experts * EXPERT_OPERATORS
        pass_ms = draft_step_ms(self.model, self.profile, self.context_tokens, tokens, distinct_experts)
        return pass_ms + unfused * self._launch_ms

    @cached_property
    def copy_ms(self) -> float:
        """One expert from host to GPU memory, ready for use."""
        return self.profile.h2d_ms(self.link_bytes) + self.model.expert_bytes / self.transport.restore_gb_s * 1e-6

    @cached_property
    def disk(self) -> Disk:
        """What is read from it."""
        everyone = self.model.num_experts
        held = everyone if self.on_host is None else self.on_host
        read_ms = self.profile.disk_read.ms(self.model.expert_bytes) if held < everyone else 0.0
        return Disk(held, read_ms, read_ms * (1 - held / everyone))

    @property
    def pace_ms(self) -> float:
        """From one expert's arrival to the next one's, when many are on their way: the slower of link and disk, on average."""
        return max(self.copy_ms, self.disk.pace_ms)

    def routing_ms(self, tokens: int, layers: int) -> float:
        """What `tokens` tokens use in `layers` layers, GPU to host."""
        if self.told_ms is not None:
            return self.told_ms
        return self.profile.d2h.ms(tokens * layers * self.model.top_k * USE_BYTES)

    @property
    def expert_bytes(self) -> int:
        return self.model.expert_bytes

    @property
    def link_bytes(self) -> float:
        """What crosses the link when an expert is copied."""
        return self.model.expert_bytes * self.transport.bits / 16

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
            routing_ms=self.routing_ms(tokens, 1),
            turn_ms=self.turn_ms,
            disk=self.disk,
        )  # fmt: skip

    @cached_property
    def _passes(self) -> dict[int, PassCosts]:
        return {}

    @property
    def _launch_ms(self) -> float:
        return self.profile.launch_us * 1e-3
