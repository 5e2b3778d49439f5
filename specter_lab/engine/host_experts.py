"""Missing experts computed by the host's cores, where they lie, while others cross the link (Fiddler, HybriMoE).

A thread of its own has them compute, so that copies and kernels are launched meanwhile. The rows go back to the GPU without the copy
engine, on which they would queue behind experts: a kernel reads them from pinned memory. Sums on the host round differently from
those on the GPU.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from specter_lab.engine.experts import ExpertMemory
from specter_lab.plan.serve import sooner_by_cpu

NEW_SHARE = 0.1  # of the latest time in the running mean
PATIENCE = 32  # times in a row that a mean keeps the cores out; then one expert is tried, for it may have been spoilt


@dataclass
class HostExperts:
    """What the host's cores take over, and how long that takes them."""

    memory: ExpertMemory
    alone_ms: float  # one expert of one token, timed when the model was loaded
    expert_ms: float  # one expert in the pass that came last, running mean
    means_ms: dict[int, float] = field(default_factory=dict)  # the running means, by tokens of a pass
    _kept_out: dict[int, int] = field(default_factory=dict)  # times in a row, by tokens of a pass
    _rooms: dict[tuple, Room] = field(default_factory=dict)  # by place and tokens that have room
    _begun: Future | None = None

    def __post_init__(self) -> None:
        bits = self.memory.host.view(
            torch.uint16
        ).numpy()  # on a CPU of float32, which hold BF16 values: their upper halves
        self._bits = list(bits if self.memory.host.dtype == torch.bfloat16 else bits[..., 1::2])  # L times [E, N]

    def share(self, missing: np.ndarray, tokens: int) -> np.ndarray:
        """Which of the missing experts [n] of a pass end sooner here than on the link: [n] bool."""
        clock = self.memory.clock()
        mean_ms = self.means_ms.get(tokens, self.alone_ms)
        chosen = sooner_by_cpu(len(missing), clock.link_free_ms - clock.now_ms, clock.copy_ms, mean_ms)
        if chosen.any():
            self._kept_out[tokens] = 0
        elif len(missing):
            self._kept_out[tokens] = self._kept_out.get(tokens, 0) + 1
            if self._kept_out[tokens] >= PATIENCE:  # try one, and take its time for the mean
                self.means_ms.pop(tokens, None)
                chosen[-1] = True
        return chosen

    def begin(self, layer: int, experts: np.ndarray, x: Tensor, used: np.ndarray, weights: Tensor, room: Room) -> None:
        """Have the rows of `room` computed that belong to these experts; `end` waits for them.

        Args:
            experts: [n].
            x: [T, H] on the host.
            used: [T, k] experts of every token.
            weights: [T, k] float32 on the host.
        """
        self.end()  # of a pass that was broken off
        if len(experts):
            what = self._bits[layer], experts, used, _float32(x), weights.numpy(), room.act
            self._begun = _cores().submit(_compute, *what, room.rows.numpy(), room.done.numpy())
        else:
            room.done.zero_()

    def end(self) -> None:
        """Wait for what was begun last."""
        if self._begun is None:
            return
        try:
            tokens, took_ms = self._begun.result()
        finally:
            if self._begun.done():  # or else Ctrl-C came first, and it is waited for again
                self._begun = None
        mean_ms = self.means_ms.get(tokens, took_ms)
        self._kept_out[tokens] = 0
        self.expert_ms = self.means_ms[tokens] = mean_ms + NEW_SHARE * (took_ms - mean_ms)

    def room(self, parts: Tensor) -> Room:
        """For `parts` [T, k, H]; used again once the device has been waited for, as it is in every layer."""
        pinned, tokens, top_k = parts.is_cuda, room_for(len(parts)), parts.shape[1]
        if (pinned, tokens) not in self._rooms:
            count = tokens * top_k
            self._rooms[pinned, tokens] = Room(
                torch.empty(count, parts.shape[2], pin_memory=pinned), torch.zeros(count, dtype=torch.uint8, pin_memory=pinned),
                np.empty((count, self.memory.shape.expert_width), np.float32),
            )  # fmt: skip
        return Room(*(part[: len(parts) * top_k] for part in self._rooms[pinned, tokens]))


def room_for(tokens: int) -> int:
    """Tokens that a buffer is made for which so many are to go into: the next power of two, so that there are few buffers."""
    return 1 << (tokens - 1).bit_length()


class Room(NamedTuple):
    """For P pairs, each one token's use of one expert."""

    rows: Tensor  # [P, H] float32 on the host
    done: Tensor  # [P] uint8 on the host: which rows the host has computed
    act: np.ndarray  # [P, I] float32

    def hand_over(self, parts: Tensor) -> None:
        """Put the computed rows into `parts` [T, k, H] on the device."""
        if parts.is_cuda:
            from specter_lab.engine.kernels.host_rows import take_rows

            take_rows(self.rows, self.done, parts)
        else:
            done = self.done.bool()
            parts.flatten(0, 1)[done] = self.rows[done]


def new_host_experts(memory: ExpertMemory) -> HostExperts:
    """For the misses of `memory`; times one expert of one token, the second time after its code was compiled."""
    host, top_k, hidden = HostExperts(memory, 0.0, 0.0), memory.shape.top_k, memory.shape.hidden
    used, room = np.arange(top_k)[None], host.room(torch.empty(1, top_k, hidden))
    for layer in (0, len(memory.host) - 1):
        host.means_ms.clear()
        host.begin(layer, used[0, :1], torch.zeros(1, hidden), used, torch.ones(1, top_k), room)
        host.end()
    host.alone_ms = host.expert_ms
    return host


def _float32(x: Tensor) -> np.ndarray:
    """Without Torch, whose threads would go on spinning beside the cores'."""
    return (
        x.numpy()
        if x.dtype == torch.float32
        else (x.view(torch.uint16).numpy().astype(np.uint32) << 16).view(np.float32)
    )


def _compute(*what: np.ndarray) -> tuple[int, float]:
    """`host_kernel.expert_rows`: how many tokens, and milliseconds per expert."""
    from specter_lab.engine.host_kernel import expert_rows

    _, experts, used, *_ = what
    began = time.perf_counter()
    expert_rows(*what)
    return len(used), (time.perf_counter() - began) * 1e3 / len(experts)


@cache
def _cores() -> ThreadPoolExecutor:
    """The thread that has the cores compute; how many is its own, so torch keeps its threads."""
    return ThreadPoolExecutor(1, "host experts", _leave_one_core)


os.register_at_fork(after_in_child=_cores.cache_clear)  # a child has no such thread


def _leave_one_core() -> None:
    """To the thread that launches copies and kernels meanwhile: one of equal shares would wait for it, and all others for that one."""
    numba.set_num_threads(max(1, numba.config.NUMBA_NUM_THREADS - 1))
