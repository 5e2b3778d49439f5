"""Who brings the target's experts to where they are computed.

Fast mode: nobody. The kernel reads each expert wherever the table says, over the link if need be, and the host learns
afterwards what was used (`ReadThrough`). Copies that are still on their way when the pass begins are waited for layer by layer,
by the kernels (`kernels.arrival`).

Paper mode: the host, layer by layer (`OnDemand`; Specter, section SEE). It reads the layer's routing, begins the copies of what is
missing, has those that are there computed meanwhile, and then the others:

    host       route? | begin copies of misses                     | route? | ...
    compute    layer  | hits ......... | wait | misses | sum       | layer  | ...
    copies            | miss, miss, miss      |

Both give bitwise the same sums (`expert_math`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from specter_lab.engine import expert_math
from specter_lab.engine.expert_math import NOT_NOW
from specter_lab.engine.experts import MISS, ExpertMemory
from specter_lab.engine.graphs import Launch, host_work
from specter_lab.plan.policy import NO_LOADS, Loads, Prefetcher
from specter_lab.plan.residency import begin_layer, end_uses, use_all

Output = TypeVar("Output")


class Uses(NamedTuple):
    """Distinct experts per layer of a target pass."""

    needed: int
    hits: int  # in a slot when their layer was routed
    read_through: int  # read over the link by kernels


class TargetExperts(Protocol):
    """What a target pass asks for."""

    memory: ExpertMemory

    def __call__(self, layer: int, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The routed experts of an MoE layer: x [T, H], indices [T, k], weights [T, k] -> [T, H]."""

    @property
    def waits(self) -> bool:
        """Whether kernels wait on the device for what `run` copies; else the host does."""

    def run(self, launch: Callable[[], Output], loads: Loads = NO_LOADS, *, captured: bool = False) -> Output:
        """Launch one target pass and copy these experts for it, those of early layers first; returns what `launch` does.

        Args:
            captured: `launch` replays a captured pass. Otherwise it may compile kernels, which no waiting kernel may precede.
        """

    def end_pass(self, used: np.ndarray) -> Uses:
        """A pass has used the experts [L, T, k]: note it, drop its pins."""


@dataclass
class ReadThrough:
    """The target's experts in fast mode."""

    memory: ExpertMemory
    _ended: torch.cuda.Event | None = None  # behind the last pass that was launched

    def __call__(self, layer: int, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        if self.waits:
            from specter_lab.engine.kernels.arrival import await_flag

            await_flag(self.memory.flags[layer : layer + 1], self.memory.waited)
        parts = expert_math.new_parts(x, indices)
        expert_math.compute(self.memory, layer, x, indices, weights, parts)
        return expert_math.combine(parts, indices, self.memory.shape.num_experts, x.dtype)

    @property
    def waits(self) -> bool:
        return self.memory.stream is not None

    def run(self, launch: Callable[[], Output], loads: Loads = NO_LOADS, *, captured: bool = False) -> Output:
        before = self._ended
        if not captured:
            self._bring(loads, before)
        out = launch()
        if self.waits:
            self._ended = torch.cuda.Event()
            self._ended.record()
        if captured:
            self._bring(loads, before)
        return out

    def _bring(self, loads: Loads, before: torch.cuda.Event | None) -> None:
        """Copy layer by layer, a flag behind each; not before the last pass has taken down its own flags."""
        if before is not None:
            self.memory.stream.wait_event(before)
        first = 0
        for layer in np.unique(loads[0]).tolist():
            self.memory.publish(first, layer)
            of_layer = loads[0] == layer
            self.memory.load((loads[0][of_layer], loads[1][of_layer]))
            first = layer
        self.memory.publish(first, len(self.memory.flags))

    def end_pass(self, used: np.ndarray) -> Uses:
        needed, hits = use_all(self.memory.slots, used)
        return Uses(needed, hits, needed - hits)


@dataclass
class OnDemand:
    """The target's experts in paper mode."""

    memory: ExpertMemory
    prefetcher: Prefetcher
    _host: dict[tuple, Tensor] = field(default_factory=dict)  # staging for indices, by shape
    _needed: int = 0
    _hits: int = 0

    def __call__(self, layer: int, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        parts, chosen = expert_math.new_parts(x, indices), torch.empty_like(indices)
        staged = self._staging(indices)
        staged[0].copy_(indices, non_blocking=True)
        host_work(
            lambda run: self._serve(layer, staged, chosen, run),
            lambda: expert_math.compute(self.memory, layer, x, chosen, weights, parts),
        )
        return expert_math.combine(parts, indices, self.memory.shape.num_experts, x.dtype)

    @property
    def waits(self) -> bool:
        return False

    def run(self, launch: Callable[[], Output], loads: Loads = NO_LOADS, *, captured: bool = False) -> Output:
        self.memory.load(loads)
        self.memory.settled()
        return launch()

    def end_pass(self, used: np.ndarray) -> Uses:
        use_all(self.memory.slots, used[:, :0])  # uses were noted when each layer was served
        found = Uses(self._needed, self._hits, 0)
        self._needed = self._hits = 0
        return found

    def _serve(self, layer: int, staged: Tensor, chosen: Tensor, run: Launch) -> None:
        """Hits first, then misses, as many at a time as the layer has slots for."""
        memory, slots = self.memory, self.memory.slots
        memory.watch.wait()  # the layer's routing has reached the host
        memory.settled()
        used, runs, waiting = staged[0].numpy(), 0, np.zeros(slots.slot_of.shape[1], np.bool_)
        there, missing = begin_layer(slots, layer, used)
        self._needed, self._hits = self._needed + len(there) + len(missing), self._hits + len(there)
        while True:
            begun = memory.load((np.full(len(missing), layer), missing), MISS)
            if len(there):
                runs, waiting[:] = runs + 1, True
                waiting[there] = False
                staged[runs].numpy()[:] = np.where(waiting[used], NOT_NOW, used)
                chosen.copy_(staged[runs], non_blocking=True)
                run()
                end_uses(slots, layer, there)
            if not len(missing):
                break
            memory.settled()
            memory.after_compute()  # whoever was computed may be overwritten
            there, missing = missing[:begun], missing[begun:]
        memory.load(self.prefetcher.verifying(layer, used, memory.clock()))

    def _staging(self, indices: Tensor) -> Tensor:
        """[E + 1, T, k] on the host: a layer's indices, then those of every run; reused once the layer is through."""
        key = tuple(indices.shape)
        if key not in self._host:
            size = (self.memory.shape.num_experts + 1, *key)
            self._host[key] = torch.empty(size, dtype=indices.dtype, pin_memory=indices.is_cuda)
        return self._host[key]
