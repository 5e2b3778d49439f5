"""How an expert crosses the link into a slot: whole, or without what the draft's INT4 codes say of it already.

Residual transport (`compress.residual`) moves about 9 of 16 bits. A record is copied into a small buffer on its own stream, and
a kernel behind it puts the weights together in their slot, bit for bit, while the next record is on its way:

    link       record | record | record | ...
    memory's          | restore | restore | ...   in this stream's order slots are filled, and flags are raised behind them
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specter_lab.engine.arena import Budget
from specter_lab.engine.records import Records, restored

BUFFERS = 4  # records on their way or being restored
ALIGNED = 16  # bytes


class Transport(Protocol):
    """Brings experts from host memory into slots."""

    copy_ms: float  # one expert on the link, measured
    bits: float  # of a weight over the link

    def bring(self, layer: int, expert: int, place: Tensor) -> None:
        """Fill `place` [N], in the order of the current stream."""

    def link_bytes(self, layer: int, expert: int) -> int:
        """What crosses the link for it."""


class WholeTransport:
    """Experts as they lie in the host slab."""

    def __init__(self, host: Tensor, place: Tensor) -> None:
        self._host, self.bits = host, 16.0  # [L, E, N]; float32 on a CPU stands for BF16
        self.copy_ms = _second_time_ms(lambda: place.copy_(host[0, 0]))

    def bring(self, layer: int, expert: int, place: Tensor) -> None:
        place.copy_(self._host[layer, expert], non_blocking=True)

    def link_bytes(self, layer: int, expert: int) -> int:
        return self._host[0, 0].nbytes


class ResidualTransport:
    """Experts beside the draft's codes.

    Raises:
        UserError: the budget does not hold the buffers.
    """

    def __init__(self, records: Records, place: Tensor, budget: Budget) -> None:
        longest = -(-int(records.length.max()) // ALIGNED) * ALIGNED
        self._records, self.bits, on_gpu = records, records.bits, place.is_cuda
        self._buffers: list[_Buffer] = []
        if on_gpu:
            budget.take("residuals on their way", BUFFERS * longest, "use transport='whole', or a larger budget")
            self._link = torch.cuda.Stream(place.device)
            room = torch.empty(BUFFERS, longest, dtype=torch.uint8, device=place.device)
            self._buffers = [_Buffer(row, torch.cuda.Event(), torch.cuda.Event()) for row in room]
            self.bring(0, 0, place)  # compiles the kernel
        record = records.of(0, 0)
        target = self._buffers[0].room[: len(record)] if on_gpu else torch.empty_like(record)
        self.copy_ms = _second_time_ms(lambda: target.copy_(record))

    def bring(self, layer: int, expert: int, place: Tensor) -> None:
        if not self._buffers:  # on a CPU
            place.copy_(restored(self._records, layer, expert))
            return
        from specter_lab.engine.kernels.residual import restore_expert

        record, buffer = self._records.of(layer, expert), self._buffers.pop(0)
        self._buffers.append(buffer)
        self._link.wait_event(buffer.free)
        with torch.cuda.stream(self._link):
            buffer.room[: len(record)].copy_(record, non_blocking=True)
            buffer.full.record()
        torch.cuda.current_stream().wait_event(buffer.full)
        restore_expert(buffer.room, self._records, layer, expert, place)
        buffer.free.record()

    def link_bytes(self, layer: int, expert: int) -> int:
        return int(self._records.length[layer, expert])


@dataclass(frozen=True)
class _Buffer:
    room: Tensor  # [longest record] uint8 on the device
    full: torch.cuda.Event
    free: torch.cuda.Event


def _second_time_ms(copy) -> float:
    for _ in range(2):
        began = time.perf_counter()
        copy()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elapsed_ms = (time.perf_counter() - began) * 1e3
    return elapsed_ms
