"""Missing experts computed by the host's cores, where they lie, while others cross the link (Fiddler, HybriMoE).

The rows go back to the GPU without the copy engine, on which they would queue behind experts: a kernel reads them from pinned
memory. Sums on the host round differently from those on the GPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from specter_lab.engine.experts import ExpertMemory
from specter_lab.plan.serve import sooner_by_cpu

FIRST_GUESS = 1.0  # an expert on the host's cores, in copies, until one has been timed
NEW_SHARE = 0.1  # of the latest time in the running mean


@dataclass
class HostExperts:
    """What the host's cores take over, and how long that takes them."""

    memory: ExpertMemory
    expert_ms: float  # one expert, running mean
    _room: dict[tuple, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # [T * k, H] float32 and [T * k] on the host

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
            weights: [T, k] on the host.
            parts: [T, k, H] float32 on the device.
        """
        began, (rows, pairs) = time.perf_counter(), self._buffers(parts)
        count = 0
        for expert in experts.tolist():
            gate_up, down = (part.to(x.dtype) for part in self.memory.pieces(self.memory.host[layer, expert]))
            of_expert = np.flatnonzero(used == expert)
            gate, up = linear(x[of_expert // used.shape[1]], gate_up).chunk(2, dim=1)
            out = linear(silu(gate) * up, down)  # [n, H]
            rows[of_expert] = out.float() * weights.view(-1)[of_expert, None].float()
            pairs[count : count + len(of_expert)] = torch.from_numpy(of_expert)
            count += len(of_expert)
        _hand_over(rows, pairs[:count], parts.flatten(0, 1))
        self.expert_ms += NEW_SHARE * ((time.perf_counter() - began) * 1e3 / len(experts) - self.expert_ms)

    def _buffers(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Used again once the device has been waited for, as it is in every layer."""
        key = tuple(parts.shape)
        if key not in self._room:
            rows = torch.empty(parts.shape, dtype=torch.float32, pin_memory=parts.is_cuda).flatten(0, 1)
            self._room[key] = rows, torch.empty(len(rows), dtype=torch.int64, pin_memory=parts.is_cuda)
        return self._room[key]


def _hand_over(rows: Tensor, pairs: Tensor, parts: Tensor) -> None:
    if not parts.is_cuda:
        parts[pairs] = rows[pairs]
        return
    from specter_lab.engine.kernels.host_rows import take_rows

    take_rows(rows, pairs, parts)


def new_host_experts(memory: ExpertMemory) -> HostExperts:
    """For the misses of `memory`, with a first guess at their time."""
    return HostExperts(memory, FIRST_GUESS * memory.copy_ms)
