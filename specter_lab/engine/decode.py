"""The decode loop: draft, prefetch, verify, accept (Specter, algorithm of sections SIC and PIO).

    while not done:
        window = propose(session, depth)          # INT4, resident; the planner prefetches what its routing names
        p, used = session.verify(depth + 1)       # the target, reading the address table
        accepted, last = accept(window, q, p)     # greedy, or exact sampling
        position += accepted + 1                  # the target's keys and values are in place already

The host waits for the device once a round, to read the accepted tokens, and while drafting for the routing of the step
*before* the one that runs. What to copy is decided by the policy's prefetcher, the same object the simulator runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Generator, Tensor

from specter_lab.engine.experts import ExpertMemory
from specter_lab.engine.session import Session
from specter_lab.measure.sampling import accept
from specter_lab.plan.depth_control import DepthController
from specter_lab.plan.policy import Clock, Prefetcher
from specter_lab.plan.residency import ABSENT, release_all, use


@dataclass
class Meter:
    """What was counted while decoding; sums over rounds unless said otherwise."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    needed: int = 0  # distinct experts per layer and target pass
    hits: int = 0  # of these: in a slot when verification began
    read_through_bytes: int = 0  # read by kernels over the link
    h2d_bytes: int = 0  # copied into slots
    seconds: float = 0.0  # of decoding, without prefill
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def acceptance(self) -> float:
        """Accepted over proposed."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else float("nan")


def decode(
    session: Session, memory: ExpertMemory, prefetcher: Prefetcher, depth: DepthController, prompt: Tensor, *,
    new_tokens: int, generator: Generator, meter: Meter,
) -> Iterator[list[int]]:  # fmt: skip
    """Committed tokens, round by round, until there are `new_tokens`; the last round may bring more.

    Args:
        prompt: [P] token ids, P at least 2.
        generator: of sampling, on the device; unused when the session is greedy.
    """
    session.position.zero_()
    session.prefill(prompt[:-1])
    last, done, copied = prompt[-1:], 0, memory.h2d_bytes
    while done < new_tokens:
        began = time.perf_counter()
        k = min(depth.next_depth(), len(session.window) - 1)
        session.step.zero_()
        session.window[:1] = last
        propose(session, memory, prefetcher, k, generator)
        memory.settled()
        p, used = session.verify(k + 1)  # [K + 1, V], [L, K + 1, k]
        accepted, last = accept(session.window[None, 1 : k + 1], session.q[None, :k], p[None], generator)
        count, *tokens = torch.cat([accepted, session.window[1 : k + 1], last[0]]).tolist()  # the round's one wait
        last = last[0]
        session.position += count + 1
        committed = tokens[:count] + tokens[k:]
        done += len(committed)
        elapsed = time.perf_counter() - began
        depth.observe(k, count, elapsed * 1e3)
        _account(meter, memory, used.cpu().numpy(), k, count, elapsed)
        yield committed
    meter.h2d_bytes += memory.h2d_bytes - copied
    meter.counters |= memory.counters


def propose(session: Session, memory: ExpertMemory, prefetcher: Prefetcher, depth: int, generator: Generator) -> None:
    """Draft `depth` tokens into the session's window; while a step runs, plan with the routing of the one before."""
    memory.load(prefetcher.begin(memory.slots, depth, _clock(memory)))
    if not depth:
        return
    session.uniform[:depth] = torch.rand(depth, generator=generator, device=session.uniform.device, dtype=torch.float64)
    routed = _Routing(session)
    for step in range(depth):
        session.draft_step()
        routed.fetch(step)
        if step:
            memory.load(prefetcher.drafted(step, *routed.of(step - 1), _clock(memory)))
    memory.load(prefetcher.drafted(depth, *routed.of(depth - 1), _clock(memory)))
    memory.load(prefetcher.finish(_clock(memory)))


class _Routing:
    """The draft's routing on its way to the host, one step at a time."""

    def __init__(self, session: Session) -> None:
        self._session, on_gpu = session, session.window.is_cuda
        make = (lambda t: torch.empty_like(t, device="cpu", pin_memory=True)) if on_gpu else (lambda t: t)
        self._experts, self._weights = make(session.drafted), make(session.drafted_weights)
        self._events = [torch.cuda.Event() for _ in range(len(session.drafted))] if on_gpu else None

    def fetch(self, step: int) -> None:
        if self._events:
            self._experts[step].copy_(self._session.drafted[step], non_blocking=True)
            self._weights[step].copy_(self._session.drafted_weights[step], non_blocking=True)
            self._events[step].record()

    def of(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Experts and weights of one step, [1, L, k] each."""
        if self._events:
            self._events[step].synchronize()
        return self._experts[step : step + 1].numpy(), self._weights[step : step + 1].numpy()


def _clock(memory: ExpertMemory) -> Clock:
    now_ms = time.perf_counter() * 1e3
    return Clock(now_ms, max(now_ms, memory.link_free_ms), memory.copy_ms)


def _account(meter: Meter, memory: ExpertMemory, used: np.ndarray, depth: int, accepted: int, seconds: float) -> None:
    """Count hits [L, T, k] by where the experts lay, drop the round's pins, tell the victim order what was used."""
    expert_bytes = memory.host[0, 0].nbytes
    for layer, experts in enumerate(used):
        release_all(memory.slots, layer)  # what was planned for this round has served its purpose
        for expert in np.unique(experts).tolist():
            meter.needed += 1
            if memory.slots.slot_of[layer, expert] != ABSENT:
                meter.hits += 1
                use(memory.slots, layer, expert)
            else:
                meter.read_through_bytes += expert_bytes
    meter.rounds += 1
    meter.drafted += depth
    meter.accepted += accepted
    meter.tokens += accepted + 1
    meter.seconds += seconds
