"""How an expert crosses the link into a slot: whole, or without what the draft's INT4 codes say of it already.

Residual transport (`compress.residual`) moves about 9 of 16 bits. Records are copied into a small room on a stream of their own, and
a captured kernel behind them puts the weights together in their slots, bit for bit, while the next records are on their way:

    link       records | records | records | ...
    memory's           | restore | restore | ...   in this stream's order slots are filled, and flags are raised behind them
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specter_lab.engine.arena import Budget
from specter_lab.engine.copies import copy_to_device
from specter_lab.engine.records import Records, restored

ROOMS = 2  # one is filled while the records of the other are restored
NOTES = 4096  # rooms that the host may have begun before the device has read what is in the first of them
ALIGNED = 16  # bytes
COPIES = 8  # that are timed together
NO_SLOT = -1  # of a place in a room that is not in use


class Transport(Protocol):
    """Brings experts from host memory into slots."""

    copy_ms: float  # one expert on the link, measured
    bits: float  # of a weight over the link

    def bring(
        self, layers: np.ndarray, experts: np.ndarray, slots: np.ndarray, stream: torch.cuda.Stream | None
    ) -> int:
        """Fill rows `slots` [n] of the device slab with experts [n] of layers [n], in the order of `stream`, and return the bytes
        that cross. Without a stream, on a CPU, it is done on return."""


class WholeTransport:
    """Experts as they lie in the host slab."""

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self._host, self._device, self.bits = host, device, 16.0  # [L, E, N]; float32 on a CPU stands for BF16
        self.copy_ms = _copy_ms(device[0], host[0, 0])

    def bring(
        self, layers: np.ndarray, experts: np.ndarray, slots: np.ndarray, stream: torch.cuda.Stream | None
    ) -> int:
        each = self._host[0, 0].nbytes
        if stream is None:
            for layer, expert, slot in zip(layers.tolist(), experts.tolist(), slots.tolist()):
                self._device[slot].copy_(self._host[layer, expert])
        else:
            targets = self._device.data_ptr() + slots * each
            sources = self._host.data_ptr() + (layers * self._host.shape[1] + experts) * each
            copy_to_device(targets, sources, np.full(len(slots), each), stream)
        return len(layers) * each


class ResidualTransport:
    """Experts beside the draft's codes.

    Raises:
        UserError: the budget does not hold the rooms.
    """

    def __init__(self, records: Records, device: Tensor, budget: Budget) -> None:
        self._records, self._device, self.bits = records, device, records.bits
        self._rooms: list[_Room] = []
        record = target = records.of(0, 0)
        if device.is_cuda:
            from specter_lab.engine.kernels.residual import EXPERTS

            longest = -(-int(records.length.max()) // ALIGNED) * ALIGNED
            budget.take(
                "residuals on their way", ROOMS * EXPERTS * longest, "use transport='whole', or a larger budget"
            )
            self._link = torch.cuda.Stream(device.device, priority=-1)  # as the stream that waits for it
            room = torch.empty(ROOMS, EXPERTS, longest, dtype=torch.uint8, device=device.device)
            self._link.wait_stream(torch.cuda.current_stream())  # whoever had that memory before
            target = room[0, 0, : len(record)]
            self._notes, self._begun = torch.empty(NOTES, EXPERTS, 2, dtype=torch.int32, pin_memory=True).numpy(), 0
            self._rooms = [_new_room(part, records, device, self._link) for part in room]
            self._records_at = (
                np.array([[slab.data_ptr()] for slab in records.slabs]) + records.first
            )  # [L, E] addresses
        self.copy_ms = _copy_ms(target, record)

    def bring(
        self, layers: np.ndarray, experts: np.ndarray, slots: np.ndarray, stream: torch.cuda.Stream | None
    ) -> int:
        if stream is None:
            for layer, expert, slot in zip(layers, experts, slots):
                self._device[slot] = restored(self._records, layer, expert)
        else:
            alone = len(np.unique(slots)) < len(slots)  # one slot filled twice: the last one stays
            together = 1 if alone else len(self._rooms[0].places)
            last = len(slots) - 1  # who waits for the last one waits for its room to be restored: it has its own
            firsts = [*range(0, last, together), last]
            with torch.cuda.stream(stream):
                for first, end in zip(firsts, [*firsts[1:], len(slots)]):
                    self._bring(layers[first:end], experts[first:end], slots[first:end], stream)
        return int(self._records.length[layers, experts].sum())

    def _bring(self, layers: np.ndarray, experts: np.ndarray, slots: np.ndarray, stream: torch.cuda.Stream) -> None:
        """As many as a room holds."""
        room, note, count = self._rooms[self._begun % ROOMS], self._notes[self._begun % NOTES], len(slots)
        self._begun += 1
        if self._begun % NOTES == 0:  # whoever fills thousands of slots at once waits for the first
            self._link.synchronize()
        note[:, 1] = NO_SLOT
        note[:count, 0], note[:count, 1] = layers * self._records.length.shape[1] + experts, slots
        self._link.wait_event(room.free)
        copy_to_device(
            np.append(room.places[:count], room.what.data_ptr()),
            np.append(self._records_at[layers, experts], note.ctypes.data),
            np.append(self._records.length[layers, experts], note.nbytes),
            self._link,
        )
        room.full.record(self._link)
        stream.wait_event(room.full)
        room.restore.replay()
        room.free.record(stream)


@dataclass(frozen=True)
class _Room:
    records: Tensor  # [n, longest record] uint8 on the device
    places: np.ndarray  # [n] their addresses
    what: Tensor  # [n, 2] int32 on the device, see `kernels.residual.restore_experts`
    restore: torch.cuda.CUDAGraph
    full: torch.cuda.Event
    free: torch.cuda.Event


def _new_room(part: Tensor, records: Records, device: Tensor, stream: torch.cuda.Stream) -> _Room:
    from specter_lab.engine.kernels.residual import restore_experts

    what, restore = torch.full((len(part), 2), NO_SLOT, dtype=torch.int32, device=part.device), torch.cuda.CUDAGraph()
    restore_experts(part, what, records, device)  # compiles, and fills no slot
    torch.cuda.synchronize()
    with torch.cuda.graph(restore, stream=stream):
        restore_experts(part, what, records, device)
    places = part.data_ptr() + np.arange(len(part)) * part[0].nbytes
    return _Room(part, places, what, restore, torch.cuda.Event(), torch.cuda.Event())


def _copy_ms(target: Tensor, source: Tensor) -> float:
    """Of one copy among COPIES in a row, the second time."""
    for _ in range(2):
        began = time.perf_counter()
        for _ in range(COPIES):
            target.copy_(source, non_blocking=True)
        if target.is_cuda:
            torch.cuda.synchronize()
        elapsed_ms = (time.perf_counter() - began) * 1e3
    return elapsed_ms / COPIES
