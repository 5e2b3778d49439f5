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


@dataclass
class HostExperts:
    """What the host's cores take over, and how long that takes them."""

    memory: ExpertMemory
    expert_ms: float  # one expert, running mean
    _rooms: dict[tuple, Room] = field(default_factory=dict)  # by place and shape of what is to be filled in

    def share(self, missing: np.ndarray) -> np.ndarray:
        """Which of the missing experts [n] end sooner here than on the link: [n] bool."""
        clock = self.memory.clock()
        return sooner_by_cpu(len(missing), clock.link_free_ms - clock.now_ms, clock.copy_ms, self.expert_ms)

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

        began, room = time.perf_counter(), self._buffers(x, parts)
        of_expert = [np.flatnonzero(used == expert) for expert in experts]  # pairs: token * k + choice
        first = np.cumsum([0, *map(len, of_expert)])
        pairs = room.pairs[: first[-1]]
        pairs.numpy()[:] = np.concatenate(of_expert)
        expert_rows(
            self._bits[layer], experts, first, pairs.numpy(), x.float().numpy(), used.shape[1], weights.view(-1).numpy(),
            room.act, room.rows.numpy(),
        )  # fmt: skip
        _hand_over(room.rows, pairs, parts.flatten(0, 1))
        self.expert_ms += NEW_SHARE * ((time.perf_counter() - began) * 1e3 / len(experts) - self.expert_ms)

    @property
    def _bits(self) -> np.ndarray:
        """[L, E, N] of the host slab; on a CPU it is float32 of BF16 values: their upper halves."""
        bits = self.memory.host.view(torch.uint16).numpy()
        return bits if self.memory.host.dtype == torch.bfloat16 else bits[..., 1::2]

    def _buffers(self, x: Tensor, parts: Tensor) -> Room:
        """Used again once the device has been waited for, as it is in every layer."""
        key = parts.is_cuda, *parts.shape
        if key not in self._rooms:
            pinned, count = parts.is_cuda, parts.shape[0] * parts.shape[1]
            self._rooms[key] = Room(
                torch.empty(count, x.shape[1], pin_memory=pinned), torch.empty(count, dtype=torch.int64, pin_memory=pinned),
                np.empty((count, self.memory.shape.expert_width), np.float32),
            )  # fmt: skip
        return self._rooms[key]


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
    """For the misses of `memory`; times one token's experts, the second time after its code was compiled."""
    host, top_k, hidden = HostExperts(memory, 0.0), memory.shape.top_k, memory.shape.hidden
    experts = np.arange(top_k)
    for layer in (0, len(memory.host) - 1):
        began = time.perf_counter()
        host.compute(
            layer, experts, torch.zeros(1, hidden), experts[None], torch.ones(1, top_k), torch.empty(1, top_k, hidden)
        )
        host.expert_ms = (time.perf_counter() - began) * 1e3 / top_k
    return host
