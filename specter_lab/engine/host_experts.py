"""Missing experts computed by the host's cores, where they lie, while others cross the link (Fiddler, HybriMoE).

The rows go back to the GPU without the copy engine, on which they would queue behind experts: a kernel reads them from pinned
memory. Sums on the host round differently from those on the GPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

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

    def compute(
        self, layer: int, experts: np.ndarray, x: Tensor, used: np.ndarray, weights: Tensor, parts: Tensor
    ) -> None:
        """Fill in the rows of `parts` that belong to these experts.

        Args:
            experts: [n].
            x: [T, H] on the host.
            used: [T, k] experts of every token.
            weights: [T, k] float32 on the host.
            parts: [T, k, H] float32 on the device.
        """
        from specter_lab.engine.host_kernel import expert_rows

        room = self._buffers(x, parts)
        began = time.perf_counter()
        of_expert = [np.flatnonzero(used == expert) for expert in experts]  # pairs: token * k + choice
        first = np.cumsum([0, *map(len, of_expert)])
        pairs = room.pairs[: first[-1]]
        pairs.numpy()[:] = np.concatenate(of_expert)
        expert_rows(
            self._bits[layer], experts, first, pairs.numpy(), x.float().numpy(), used.shape[1], weights.view(-1).numpy(),
            room.act, room.rows.numpy(),
        )  # fmt: skip
        took_ms = (time.perf_counter() - began) * 1e3 / len(experts)
        _hand_over(room.rows, pairs, parts.flatten(0, 1))
        mean_ms = self.means_ms.get(len(x), took_ms)
        self._kept_out[len(x)] = 0
        self.expert_ms = self.means_ms[len(x)] = mean_ms + NEW_SHARE * (took_ms - mean_ms)

    @property
    def _bits(self) -> np.ndarray:
        """[L, E, N] of the host slab; on a CPU it is float32 of BF16 values: their upper halves."""
        bits = self.memory.host.view(torch.uint16).numpy()
        return bits if self.memory.host.dtype == torch.bfloat16 else bits[..., 1::2]

    def _buffers(self, x: Tensor, parts: Tensor) -> Room:
        """Used again once the device has been waited for, as it is in every layer."""
        pinned, tokens, top_k = parts.is_cuda, room_for(len(parts)), parts.shape[1]
        if (pinned, tokens) not in self._rooms:
            count = tokens * top_k
            self._rooms[pinned, tokens] = Room(
                torch.empty(count, x.shape[1], pin_memory=pinned), torch.empty(count, dtype=torch.int64, pin_memory=pinned),
                np.empty((count, self.memory.shape.expert_width), np.float32),
            )  # fmt: skip
        return Room(*(part[: len(parts) * top_k] for part in self._rooms[pinned, tokens]))


def room_for(tokens: int) -> int:
    """Tokens that a buffer is made for which so many are to go into: the next power of two, so that there are few buffers."""
    return 1 << (tokens - 1).bit_length()


class Room(NamedTuple):
    """For P pairs."""

    rows: Tensor  # [P, H] float32 on the host
    pairs: Tensor  # [P] on the host
    act: np.ndarray  # [P, I] float32


def _hand_over(rows: Tensor, pairs: Tensor, parts: Tensor) -> None:
    if not parts.is_cuda:
        parts[pairs] = rows[pairs]
        return
    from specter_lab.engine.kernels.host_rows import take_rows

    take_rows(rows, pairs, parts)


def new_host_experts(memory: ExpertMemory) -> HostExperts:
    """For the misses of `memory`; times one expert of one token, the second time after its code was compiled."""
    host, top_k, hidden = HostExperts(memory, 0.0, 0.0), memory.shape.top_k, memory.shape.hidden
    used = np.arange(top_k)[None]
    for layer in (0, len(memory.host) - 1):
        host.means_ms.clear()
        host.compute(
            layer, used[0, :1], torch.zeros(1, hidden), used, torch.ones(1, top_k), torch.empty(1, top_k, hidden)
        )
    host.alone_ms = host.expert_ms
    return host
