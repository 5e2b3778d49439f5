"""Where routed experts lie: every one in the host slab, some in device slots, each at an address that kernels read it from.

The slots' state is the planner's (`plan.residency.Slots`), changed by the planner's functions; this file moves the bytes. Copies
run on their own stream. Kernels learn addresses behind the copies they wait for: a captured pass that needs no host from a table
[L, E] on the device (`publish`), one that the host serves layer by layer from the host (`addresses_of`).
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specter_lab.engine.arena import Budget, host_slab
from specter_lab.engine.records import Records
from specter_lab.engine.shape import Shape
from specter_lab.engine.stopwatch import Stopwatch
from specter_lab.engine.transport import ResidualTransport, Transport, WholeTransport
from specter_lab.plan.policy import Clock, Loads
from specter_lab.plan.residency import ABSENT, NONE, Slots, new_slots, reserve_all

PREFETCH, MISS = "prefetch", "miss"  # kinds of copies


@dataclass
class ExpertMemory:
    """Host slab, device slots, table and byte counters of one model."""

    shape: Shape
    host: Tensor  # [L, E, N] gate, up and down of every expert
    device: Tensor  # [sum of slots, N]
    first_slot: np.ndarray  # [L] where a layer's slots begin in `device`
    slots: Slots
    table: Tensor  # [L, E] int64 on the device: where kernels read an expert, as last published
    stream: torch.cuda.Stream | None  # of the copies, above kernels that wait for them; None on a CPU
    transport: Transport  # brings an expert from the host into a slot
    flags: Tensor  # [L] int32 on the device: a layer's copies have arrived (`kernels.arrival`)
    waited: Tensor  # [2] int64 on the device: nanoseconds that kernels waited for flags, and whether one gave up
    watch: Stopwatch
    link_free_ms: float = 0.0  # when the copies begun so far should have ended, on the host's clock
    h2d_bytes: int = 0  # copied into slots; counted at the copy call
    counters: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        on_gpu, layers, experts = self.stream is not None, *self.host.shape[:2]
        self._expert_bytes = self.host[0, 0].nbytes
        self._in_host = self.host.data_ptr() + np.arange(layers * experts).reshape(layers, experts) * self._expert_bytes
        self._in_slots = self.device.data_ptr() + self.first_slot[:, None] * self._expert_bytes  # [L, 1]
        self._rows = torch.empty(layers, experts, dtype=torch.int64, pin_memory=on_gpu)  # on their way to the table
        self._ones = torch.ones(layers, dtype=torch.int32, pin_memory=on_gpu)
        self._copied, self._computed = (torch.cuda.Event(), torch.cuda.Event()) if on_gpu else (None, None)
        self.on_way = np.zeros((layers, experts), np.bool_)  # copies were begun that no stream waits for yet

    def pieces(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """One expert's (gate and up [2I, H], down [H, I]) as views of its block [N]."""
        cut = 2 * self.shape.expert_width * self.shape.hidden
        return block[:cut].view(-1, self.shape.hidden), block[cut:].view(self.shape.hidden, -1)

    def block(self, layer: int, expert: int) -> Tensor:
        """The bytes at an address of `addresses_of`."""
        slot = self.slots.slot_of[layer, expert]
        if slot != ABSENT and self.slots.ready_ms[layer, slot] == 0:
            return self.device[self.first_slot[layer] + slot]
        return self.host[layer, expert]

    def addresses_of(self, layers: int | slice) -> np.ndarray:
        """Where kernels read the experts of one layer [E], or of several [n, E], once copies that were begun have ended: in their
        slots, or on the host."""
        slot, ready_ms = self.slots.slot_of[layers], self.slots.ready_ms[layers]
        begun = (slot != ABSENT) & (
            np.take_along_axis(ready_ms, np.maximum(slot, 0), -1) == 0
        )  # not one that was broken off
        return np.where(begun, self._in_slots[layers] + slot * self._expert_bytes, self._in_host[layers])

    def load(self, loads: Loads, work: str = PREFETCH) -> int:
        """Begin copies of those of some experts that are absent, in order, until a layer has every slot pinned; returns how many
        were begun."""
        absent = self.slots.slot_of[loads] == ABSENT  # a plan that was broken off may name others
        layers, experts = loads[0][absent], loads[1][absent]
        wanted = len(layers)
        if not wanted:
            return 0
        places = reserve_all(self.slots, layers, experts)
        found = places != NONE
        layers, experts, places = layers[found], experts[found], places[found]
        begun = len(places)
        if begun:
            with self.watch.stretch("H2D", work, on=self.stream):  # on a CPU everything happens at once
                self.h2d_bytes += self.transport.bring(layers, experts, self.first_slot[layers] + places, self.stream)
            self.slots.ready_ms[layers, places] = 0  # `settled` tells kernels when; the host needs no event of its own
            self.on_way[layers, experts] = True
            self.link_free_ms = max(self.link_free_ms, time.perf_counter() * 1e3) + begun * self.transport.copy_ms
        if work == PREFETCH and begun < wanted:
            self.count("prefetch refused: all slots pinned", wanted - begun)
        return begun

    def settled(self) -> None:
        """Make the current stream wait for every copy that was begun.

        Kernels that still run when more is loaded must not read experts that come or go: those they need are pinned.
        """
        if not self.on_way.any():
            return
        self.on_way[:] = False
        if self.stream is not None:
            with self.watch.stretch("compute", "stall"):
                self._copied.record(self.stream)
                self._copied.wait()

    def publish(self, first: int, last: int) -> None:
        """Behind the copies begun so far: rows of the table and flags of layers first .. last - 1."""
        if first == last or self.stream is None:
            return
        rows = slice(first, last)
        self.on_way[rows] = False
        self._rows[rows] = torch.from_numpy(self.addresses_of(rows))
        with torch.cuda.stream(self.stream):
            self.table[rows].copy_(self._rows[rows], non_blocking=True)
            self.flags[rows].copy_(self._ones[rows], non_blocking=True)

    def after_compute(self) -> None:
        """Make the copies to come wait for what the current stream has been given so far."""
        if self.stream is not None:
            self._computed.record()
            self._computed.wait(self.stream)

    def clock(self) -> Clock:
        """Where the copies stand, on the host's clock."""
        now_ms = time.perf_counter() * 1e3
        return Clock(now_ms, max(now_ms, self.link_free_ms), self.transport.copy_ms)

    def count(self, name: str, times: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + times


def new_host(shape: Shape, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Room for every routed expert: [L, E, N].

    Raises:
        UserError: the host's memory does not suffice, or cannot be pinned.
    """
    layers = len(shape.moe_layers)
    slab = host_slab(layers * shape.num_experts * shape.expert_numel * dtype.itemsize, pinned=pinned).view(dtype)
    return slab.view(layers, shape.num_experts, shape.expert_numel)


def put(host: Tensor, layer: int, expert: int, part: int, weight: Tensor) -> None:
    """Put one matrix of an expert (0: gate, 1: up, 2: down) into the host slab."""
    size = weight.numel()
    host[layer, expert, part * size : (part + 1) * size] = weight.flatten()


def new_expert_memory(
    shape: Shape, host: Tensor, slots_per_layer: np.ndarray, budget: Budget, *, device: torch.device, order: int,
    records: Records | None = None,
) -> ExpertMemory:  # fmt: skip
    """Empty slots for `slots_per_layer` [L] experts of the host slab [L, E, N], which cross the link as `records` if given.

    Raises:
        UserError: the budget does not suffice.
    """
    total, on_gpu = int(slots_per_layer.sum()), device.type == "cuda"
    budget.take("expert slots", total * host[0, 0].nbytes, "ask for fewer slots or a larger budget")
    slab = torch.empty(total, shape.expert_numel, dtype=host.dtype, device=device)
    memory = ExpertMemory(
        shape=shape, host=host, device=slab,
        first_slot=np.concatenate([[0], np.cumsum(slots_per_layer)[:-1]]),
        slots=new_slots(slots_per_layer, host.shape[1], order),
        table=torch.zeros(host.shape[:2], dtype=torch.int64, device=device),
        stream=torch.cuda.Stream(device, priority=-1) if on_gpu else None, transport=ResidualTransport(records, slab, budget) if records else WholeTransport(host, slab),
        flags=torch.zeros(len(host), dtype=torch.int32, device=device),
        waited=torch.zeros(2, dtype=torch.int64, device=device), watch=Stopwatch(on_gpu),
    )  # fmt: skip
    if memory.stream is not None:  # no memory is given to another while copies into it, or from it, are on their way
        weakref.finalize(memory, memory.stream.synchronize).atexit = False
    return memory
