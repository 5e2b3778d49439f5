"""Who brings the target's experts to where they are computed.

Fast mode: nobody. The kernel reads each expert wherever the table says, over the link if need be, and the host learns
afterwards what was used (`ReadThrough`). Copies that are still on their way when the pass begins are waited for layer by layer,
by the kernels (`kernels.arrival`).

Paper mode: the host, layer by layer (`OnDemand`; Specter, section SEE). It reads the layer's routing, begins the copies of what is
missing, has those that are there computed meanwhile, and then the others:

    host       route? | begin copies of misses | compute some itself | route? | ...
    compute    layer  | hits ......... | wait | misses | sum         | layer  | ...
    copies            | miss, miss, miss      |

Both give bitwise the same sums (`expert_math`), unless the host computes some of the misses itself (`host_experts`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from specter_lab.engine import expert_math
from specter_lab.engine.decoder import NOT_NOW
from specter_lab.engine.experts import MISS, ExpertMemory
from specter_lab.engine.graphs import Launch, host_work
from specter_lab.engine.host_experts import HostExperts, Room, room_for
from specter_lab.plan.policy import NO_LOADS, Loads, Prefetcher
from specter_lab.plan.residency import begin_layer, end_uses, of_a_turn, use_all

Output = TypeVar("Output")


class Uses(NamedTuple):
    """Distinct experts per layer of a target pass."""

    needed: int
    hits: int  # in a slot when their layer was routed
    read_through: int = 0  # read over the link by kernels
    by_host: int = 0  # computed by the host's cores


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
        expert_math.compute(self.memory, layer, x, indices, weights, parts, self.memory.table[layer])
        return expert_math.combine(parts, indices, self.memory.shape.num_experts, x.dtype)

    @property
    def waits(self) -> bool:
        return self.memory.stream is not None

    def run(self, launch: Callable[[], Output], loads: Loads = NO_LOADS, *, captured: bool = False) -> Output:
        before = self._ended
        if not captured:
            self._bring(loads, before)
        with _nothing_collected():
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
        return Uses(needed, hits, read_through=needed - hits)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python frees no garbage here: an old engine's graphs and pinned memory are given back when the device is idle, which waits for
    copies that are yet to begin."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class OnDemand:
    """The target's experts in paper mode."""

    memory: ExpertMemory
    prefetcher: Prefetcher
    host: HostExperts | None = None  # computes some of the misses
    _staged: dict[int, Staging] = field(default_factory=dict)  # by tokens that have room
    _needed: int = 0
    _hits: int = 0
    _by_host: int = 0

    def __call__(self, layer: int, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        parts, experts = expert_math.new_parts(x, indices), self.memory.shape.num_experts
        told = torch.empty(experts + indices.numel(), dtype=torch.int64, device=x.device)  # see `Staging.runs`
        addresses, chosen = told[:experts], told[experts:].view_as(indices)
        staged = self._staging(x, indices, weights)
        staged.indices.copy_(indices, non_blocking=True)
        room = self.host.room(parts) if self.host else None
        if room:
            staged.x.copy_(x, non_blocking=True)
            staged.weights.copy_(weights, non_blocking=True)
        host_work(
            lambda run: self._serve(layer, staged, told, room, run),
            lambda: expert_math.compute(self.memory, layer, x, chosen, weights, parts, addresses),
        )
        if room:
            room.hand_over(parts)
        return expert_math.combine(parts, indices, experts, x.dtype)

    @property
    def waits(self) -> bool:
        return False

    def run(self, launch: Callable[[], Output], loads: Loads = NO_LOADS, *, captured: bool = False) -> Output:
        self.memory.load(loads)
        self.memory.settled()
        return launch()

    def end_pass(self, used: np.ndarray) -> Uses:
        use_all(self.memory.slots, used[:, :0])  # uses were noted when each layer was served
        found = Uses(self._needed, self._hits, by_host=self._by_host)
        self._needed = self._hits = self._by_host = 0
        return found

    def _serve(self, layer: int, staged: Staging, told: Tensor, room: Room | None, run: Launch) -> None:
        """Copies first, for the link has most to do; then those that are there, all at once; then the others as they come. Where slots
        are few, half of them compute while the other half is filled."""
        memory, slots = self.memory, self.memory.slots
        memory.watch.wait()  # the layer's routing has reached the host
        used, half, runs = staged.indices.numpy(), of_a_turn(slots, layer), count()
        counts = used[used[:, 0] != NOT_NOW]  # not those of free lanes, or beyond a lane's own depth
        hits, missing = begin_layer(slots, layer, counts)
        self._needed, self._hits = self._needed + len(hits) + len(missing), self._hits + len(hits)
        ahead = memory.on_way[layer, hits]

        def compute(experts: np.ndarray) -> None:
            if len(experts):
                told.copy_(staged.of_run(next(runs), memory.addresses_of(layer), experts), non_blocking=True)
                run()
                end_uses(slots, layer, experts)

        own, missing = self._shared(layer, missing, len(used))
        coming, missing = self._begun(layer, missing, half)
        compute(hits[~ahead])
        try:
            if self.host:
                self.host.begin(layer, own, staged.x, used, staged.weights, room)
            waiting = np.concatenate([hits[ahead], coming])
            while len(waiting) or len(missing):
                memory.after_compute()  # whoever was computed may be overwritten
                memory.settled()
                coming, missing = self._begun(layer, missing, half)
                turn = half if len(missing) else len(waiting)
                compute(waiting[:turn])
                waiting = np.concatenate([waiting[turn:], coming])
            memory.load(self.prefetcher.verifying(layer, counts, memory.clock()))
        finally:  # the cores read what the next layer overwrites
            if self.host:
                self.host.end()

    def _shared(self, layer: int, missing: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Of a layer's missing experts: those that the host's cores compute, which need no slot, and the others."""
        if self.host is None:
            return missing[:0], missing
        by_host = self.host.share(missing, tokens)
        own = missing[by_host]
        self.memory.slots.pinned[layer, own] = False
        self._by_host += len(own)
        return own, missing[~by_host]

    def _begun(self, layer: int, missing: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Copy as many as there are slots for, `most` at once: those, and the others."""
        wanted = missing[:most]
        begun = self.memory.load((np.full(len(wanted), layer), wanted), MISS)
        return missing[:begun], missing[begun:]

    def _staging(self, x: Tensor, indices: Tensor, weights: Tensor) -> Staging:
        """Passes come one after the other, so those of about as many tokens share what lies in pinned memory."""
        tokens = room_for(len(indices))
        if tokens not in self._staged:
            self._staged[tokens] = _new_staging(self.memory.shape.num_experts, tokens, x, indices, weights)
        return self._staged[tokens].first(len(indices))


class Staging(NamedTuple):
    """A layer's routing on the host, and what every run computes of it; used again once the layer is through."""

    indices: Tensor  # [T, k]
    x: Tensor  # [T, H]
    weights: Tensor  # [T, k]
    runs: Tensor  # [E, E + T * k] what each run is told: addresses of all experts, and its choices, NOT_NOW for others

    def first(self, tokens: int) -> Staging:
        experts = len(self.runs)
        return Staging(
            self.indices[:tokens], self.x[:tokens], self.weights[:tokens],
            self.runs[:, : experts + tokens * self.indices.shape[1]],
        )  # fmt: skip

    def of_run(self, run: int, addresses: np.ndarray, experts: np.ndarray) -> Tensor:
        """Run `run` computes these experts [n] alone."""
        used, chosen = self.indices.numpy(), np.zeros(len(addresses) + 1, np.bool_)  # NOT_NOW meets the last, no expert
        chosen[experts] = True
        told = self.runs[run]
        note = told.numpy()
        note[: len(addresses)], note[len(addresses) :] = addresses, np.where(chosen[used], used, NOT_NOW).ravel()
        return told


def _new_staging(num_experts: int, tokens: int, x: Tensor, indices: Tensor, weights: Tensor) -> Staging:
    def room(like: Tensor, *size: int) -> Tensor:
        return torch.empty(size, dtype=like.dtype, pin_memory=like.is_cuda)

    top_k = indices.shape[1]
    return Staging(
        room(indices, tokens, top_k), room(x, tokens, x.shape[1]), room(weights, tokens, top_k),
        room(indices, num_experts, num_experts + tokens * top_k),
    )  # fmt: skip
