"""Where routed experts lie: every one in the host slab, some in device slots, and a table that says where to read each.

The slots' state is the planner's (`plan.residency.Slots`), changed by the planner's functions; this file moves the bytes. The
table [L, E] holds the address a kernel reads an expert from: its slot once the copy has ended, its pinned host address before
that and whenever it has no slot. Copies run on their own stream, each one after the table has let go of the victim, so a
kernel never reads a slot that is being overwritten: verification waits for `settled` before it starts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specter_lab.engine.arena import Budget, host_slab
from specter_lab.engine.shape import Shape
from specter_lab.plan.policy import Loads
from specter_lab.plan.residency import ABSENT, NONE, Slots, new_slots, reserve


@dataclass
class ExpertMemory:
    """Host slab, device slots, table and byte counters of one model."""

    shape: Shape
    host: Tensor  # [L, E, N] gate, up and down of every expert
    device: Tensor  # [sum of slots, N]
    first_slot: np.ndarray  # [L] where a layer's slots begin in `device`
    slots: Slots
    table: Tensor  # [L, E] int64, addresses; on the device
    stream: torch.cuda.Stream | None  # of the copies; None on a CPU
    copy_ms: float  # one expert, measured when the slabs were made
    link_free_ms: float = 0.0  # when the copies begun so far should have ended, on the host's clock
    h2d_bytes: int = 0  # copied into slots; counted at the copy call
    counters: dict[str, int] = field(default_factory=dict)

    def pieces(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """One expert's (gate and up [2I, H], down [H, I]) as views of its block [N]."""
        cut = 2 * self.shape.expert_width * self.shape.hidden
        return block[:cut].view(-1, self.shape.hidden), block[cut:].view(self.shape.hidden, -1)

    def block(self, layer: int, expert: int) -> Tensor:
        """The bytes a kernel would read: the slot's if the table says so, else the host's."""
        slot = self.slots.slot_of[layer, expert]
        if slot != ABSENT and self.slots.ready_ms[layer, slot] == 0:
            return self.device[self.first_slot[layer] + slot]
        return self.host[layer, expert]

    def load(self, loads: Loads) -> int:
        """Begin copies of absent experts, in order; returns how many were begun (the others found every slot pinned)."""
        begun = 0
        for layer, expert in zip(*(part.tolist() for part in loads)):
            begun += self._copy(layer, expert)
        if begun < len(loads[0]):
            self.count("prefetch refused: all slots pinned", len(loads[0]) - begun)
        return begun

    def _copy(self, layer: int, expert: int) -> bool:
        before = self.slots.expert_in[layer].copy()
        slot = reserve(self.slots, layer, expert)
        if slot == NONE:
            return False
        victim, place = before[slot], self.device[self.first_slot[layer] + slot]
        with torch.cuda.stream(self.stream):  # on a CPU: None, and everything happens at once
            if victim != ABSENT:
                self.table[layer, victim] = self.host[layer, victim].data_ptr()
            place.copy_(self.host[layer, expert], non_blocking=True)
            self.table[layer, expert] = place.data_ptr()
        self.slots.ready_ms[layer, slot] = 0  # the table tells kernels when; the host needs no event of its own
        self.h2d_bytes += place.nbytes
        self.link_free_ms = max(self.link_free_ms, time.perf_counter() * 1e3) + self.copy_ms
        return True

    def settled(self) -> None:
        """Make the current stream wait for every copy that was begun."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def count(self, name: str, times: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + times


def new_expert_memory(
    shape: Shape, slots_per_layer: np.ndarray, budget: Budget, *, device: str, dtype: torch.dtype, order: int
) -> ExpertMemory:
    """Slabs for `slots_per_layer` [L] experts; host blocks are filled by the caller (`fill`).

    Raises:
        UserError: the budget or the host's memory does not suffice.
    """
    layers, on_gpu = len(shape.moe_layers), torch.device(device).type == "cuda"
    itemsize = dtype.itemsize
    total = int(slots_per_layer.sum())
    budget.take("expert slots", total * shape.expert_numel * itemsize, "ask for fewer slots or a larger budget")
    host = host_slab(layers * shape.num_experts * shape.expert_numel * itemsize, pinned=on_gpu).view(dtype)
    host = host.view(layers, shape.num_experts, shape.expert_numel)
    addresses = host.data_ptr() + torch.arange(layers * shape.num_experts) * shape.expert_numel * itemsize
    slab = torch.empty(total, shape.expert_numel, dtype=dtype, device=device)
    return ExpertMemory(
        shape=shape, host=host, device=slab,
        first_slot=np.concatenate([[0], np.cumsum(slots_per_layer)[:-1]]),
        slots=new_slots(slots_per_layer, shape.num_experts, order),
        table=addresses.view(layers, shape.num_experts).to(device),
        stream=torch.cuda.Stream(device) if on_gpu else None, copy_ms=_copy_ms(host[0, 0], slab[0]),
    )  # fmt: skip


def _copy_ms(source: Tensor, target: Tensor) -> float:
    """Time of one expert's copy, the second of two."""
    for _ in range(2):
        began = time.perf_counter()
        target.copy_(source)
        if target.is_cuda:
            torch.cuda.synchronize()
        elapsed_ms = (time.perf_counter() - began) * 1e3
    return elapsed_ms


def fill(memory: ExpertMemory, layer: int, expert: int, part: int, weight: Tensor) -> None:
    """Put one matrix of an expert (0: gate, 1: up, 2: down) into the host slab."""
    size = weight.numel()
    memory.host[layer, expert, part * size : (part + 1) * size] = weight.flatten()
