"""Where routed experts lie: every one in the host slab, some in device slots, and a table that says where to read each.

The slots' state is the planner's (`plan.residency.Slots`), changed by the planner's functions; this file moves the bytes. The
table [L, E] holds the address a kernel reads an expert from: its slot, or its pinned host address when it has none. Copies run
on their own stream. Before a pass reads the table it waits for them and takes over the new addresses (`settled`), so no slot
is read while it is overwritten, and a captured pass needs no host.
"""

from __future__ import annotations

import time
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
    table: Tensor  # [L, E] int64 on the device: where kernels read an expert
    addresses: Tensor  # the same on the host, a step ahead: with the copies that are under way
    stream: torch.cuda.Stream | None  # of the copies, above kernels that wait for them; None on a CPU
    transport: Transport  # brings an expert from the host into a slot
    held: np.ndarray  # [L, S] expert whose address a slot's bytes are named by in the table, or ABSENT
    flags: Tensor  # [L] int32 on the device: a layer's copies have arrived (`kernels.arrival`)
    waited: Tensor  # [2] int64 on the device: nanoseconds that kernels waited for flags, and whether one gave up
    watch: Stopwatch
    snapshots: Tensor  # [N, L, E] on the host: `addresses` for copies to the table to read, while the host changes it
    link_free_ms: float = 0.0  # when the copies begun so far should have ended, on the host's clock
    h2d_bytes: int = 0  # copied into slots; counted at the copy call
    counters: dict[str, int] = field(default_factory=dict)
    _unsettled: bool = False  # copies were begun that no stream waits for yet
    _settled: int = 0  # times so far

    def __post_init__(self) -> None:
        self._ones = torch.ones(len(self.flags), dtype=torch.int32, pin_memory=self.stream is not None)
        self._written, self._expert_bytes = self.addresses.numpy(), self.host[0, 0].nbytes  # the same memory

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

    def load(self, loads: Loads, work: str = PREFETCH) -> int:
        """Begin copies of absent experts, in order, until a layer has every slot pinned; returns how many were begun."""
        if not len(loads[0]):
            return 0
        places = reserve_all(self.slots, *loads)
        found = places != NONE
        layers, experts, places = loads[0][found], loads[1][found], places[found]
        begun, wanted = len(places), len(loads[0])
        with torch.cuda.stream(self.stream), self.watch.stretch("H2D", work):  # on a CPU everything happens at once
            self.h2d_bytes += self.transport.bring(layers, experts, self.first_slot[layers] + places)
        for layer, expert, slot in zip(layers.tolist(), experts.tolist(), places.tolist()):
            self._note(layer, expert, slot)
        if work == PREFETCH and begun < wanted:
            self.count("prefetch refused: all slots pinned", wanted - begun)
        self._unsettled |= begun > 0
        self.link_free_ms = max(self.link_free_ms, time.perf_counter() * 1e3) + begun * self.transport.copy_ms
        return begun

    def _note(self, layer: int, expert: int, slot: int) -> None:
        """An expert is on its way into a slot; whoever it held is read from the host again."""
        victim, row = self.held[layer, slot], layer * self.host.shape[1]
        if victim != ABSENT:
            self._written[layer, victim] = self.host.data_ptr() + (row + victim) * self._expert_bytes
        self._written[layer, expert] = self.device.data_ptr() + (self.first_slot[layer] + slot) * self._expert_bytes
        self.held[layer, slot] = expert
        self.slots.ready_ms[layer, slot] = 0  # `settled` tells kernels when; the host needs no event of its own

    def settled(self) -> None:
        """Make the current stream wait for every copy that was begun; the table then says where experts lie.

        Kernels that still run when more is loaded must not read experts that come or go: those they need are pinned. At most
        `len(snapshots)` calls may be ahead of the device.
        """
        if not self._unsettled:
            return
        self._unsettled = False
        if self.stream is not None:
            with self.watch.stretch("compute", "stall"):
                torch.cuda.current_stream().wait_stream(self.stream)
        snapshot = self.snapshots[self._settled % len(self.snapshots)]
        self._settled += 1
        self.table.copy_(snapshot.copy_(self.addresses), non_blocking=True)

    def publish(self, first: int, last: int) -> None:
        """Behind the copies begun so far: rows of the table and flags of layers first .. last - 1."""
        if first == last or self.stream is None:
            return
        self._unsettled = False
        with torch.cuda.stream(self.stream):
            self.table[first:last].copy_(self.addresses[first:last], non_blocking=True)
            self.flags[first:last].copy_(self._ones[first:last], non_blocking=True)

    def after_compute(self) -> None:
        """Make the copies to come wait for what the current stream has been given so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

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
    layers, experts = host.shape[:2]
    addresses = host.data_ptr() + torch.arange(layers * experts).view(layers, experts) * host[0, 0].nbytes
    slab = torch.empty(total, shape.expert_numel, dtype=host.dtype, device=device)
    return ExpertMemory(
        shape=shape, host=host, device=slab,
        first_slot=np.concatenate([[0], np.cumsum(slots_per_layer)[:-1]]),
        slots=new_slots(slots_per_layer, experts, order),
        table=addresses.to(device), addresses=addresses.pin_memory() if on_gpu else addresses,
        stream=torch.cuda.Stream(device, priority=-1) if on_gpu else None, transport=ResidualTransport(records, slab, budget) if records else WholeTransport(host, slab),
        held=np.full((layers, int(slots_per_layer.max())), ABSENT),
        flags=torch.zeros(layers, dtype=torch.int32, device=device),
        waited=torch.zeros(2, dtype=torch.int64, device=device), watch=Stopwatch(on_gpu),
        snapshots=torch.empty(2 * experts, layers, experts, dtype=torch.int64, pin_memory=on_gpu),
    )  # fmt: skip
