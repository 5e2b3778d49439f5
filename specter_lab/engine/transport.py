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

    def bring(self, layers: np.ndarray, experts: np.ndarray, slots: np.ndarray) -> int:
        """Fill rows `slots` [n] of the device slab with experts [n] of layers [n], in the order of the current stream, and return the
        bytes that cross."""


class WholeTransport:
    """Experts as they lie in the host slab."""

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self._host, self._device, self.bits = host, device, 16.0  # [L, E, N]; float32 on a CPU stands for BF16
        self.copy_ms = _copy_ms(device[0], host[0, 0])

    def bring(self, layers: np.ndarray, experts: np.ndarray, slots: np.ndarray) -> int:
        for layer, expert, slot in zip(layers.tolist(), experts.tolist(), slots.tolist()):
            self._device[slot].copy_(self._host[layer, expert], non_blocking=True)
        return len(layers) * self._host[0, 0].nbytes


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
            self._notes, self._noted = torch.empty(NOTES, EXPERTS, 2, dtype=torch.int32, pin_memory=True), 0
            self._rooms = [_new_room(part, records, device, self._link) for part in room]
        self.copy_ms = _copy_ms(target, record)

    def bring(self, layers: np.ndarray, experts: np.ndarray, slots: np.ndarray) -> int:
        if self._rooms:
            alone = len(np.unique(slots)) < len(slots)  # one slot filled twice: the last one stays
            together = 1 if alone else len(self._rooms[0].records)
            for first in range(0, len(layers), together):
                self._bring(*(part[first : first + together].tolist() for part in (layers, experts, slots)))
        else:  # on a CPU
            for layer, expert, slot in zip(layers, experts, slots):
                self._device[slot] = restored(self._records, layer, expert)
        return int(self._records.length[layers, experts].sum())

    def _bring(self, layers: list[int], experts: list[int], slots: list[int]) -> None:
        """As many as a room holds."""
        room = self._rooms.pop(0)
        self._rooms.append(room)
        each = self._records.length.shape[1]
        note = self._notes[self._noted % NOTES]
        self._noted += 1
        said = note.numpy()
        said[:, 1] = NO_SLOT
        said[: len(slots), 0], said[: len(slots), 1] = (
            [layer * each + expert for layer, expert in zip(layers, experts)],
            slots,
        )
        self._link.wait_event(room.free)
        with torch.cuda.stream(self._link):
            room.what.copy_(note, non_blocking=True)
            for layer, expert, place in zip(layers, experts, room.records):
                record = self._records.of(layer, expert)
                place[: len(record)].copy_(record, non_blocking=True)
            room.full.record()
        torch.cuda.current_stream().wait_event(room.full)
        room.restore.replay()
        room.free.record()


@dataclass(frozen=True)
class _Room:
    records: Tensor  # [n, longest record] uint8 on the device
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
    return _Room(part, what, restore, torch.cuda.Event(), torch.cuda.Event())


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
