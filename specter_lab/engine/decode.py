"""The decode loop: draft, prefetch, verify, accept (Specter, algorithm of sections SIC and PIO).

    while not done:
        propose(session, memory, prefetcher, k)   # INT4, resident; the planner prefetches what its routing names
        verified = session.verify(k)              # the target's experts where they lie; greedy or exact sampling
        yield verified.committed()                # the target's keys and values are in place already

The host waits for the device once a round, to read the accepted tokens, and while drafting for the routing of the step
*before* the one that runs. What to copy is decided by the policy's prefetcher, the same object the simulator runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from specter_lab.engine.decoder import NOT_NOW
from specter_lab.engine.experts import ExpertMemory
from specter_lab.engine.served import Uses
from specter_lab.engine.session import Session
from specter_lab.plan.depth_control import DepthController
from specter_lab.plan.policy import Prefetcher
from specter_lab.plan.streams import Span


class RoundRouting(NamedTuple):
    """Which experts a round used; for those who watch (`Engine.on_round`)."""

    accepted: int
    drafted: np.ndarray  # [K, L, k]
    drafted_weights: np.ndarray  # [K, L, k]
    used: np.ndarray  # [L, K + 1, k], by the target


OnRound = Callable[[RoundRouting, list[Span]], None]


@dataclass
class Meter:
    """What was counted while decoding; sums over rounds unless said otherwise."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    needed: int = 0  # distinct experts per layer and target pass
    hits: int = 0  # of these: in a slot when verification began
    by_host: int = 0  # computed by the host's cores
    read_through_bytes: int = 0  # read by kernels over the link
    h2d_bytes: int = 0  # copied into slots
    seconds: float = 0.0  # of decoding, without prefill
    busy_ms: dict[str, float] = field(
        default_factory=dict
    )  # by kind of work: "draft step", "verify", "prefetch", "miss", "stall"
    counters: dict[str, int] = field(default_factory=dict)

    def add_round(
        self, drafted: int, accepted: int, tokens: int, uses: Uses, read_through_bytes: int, h2d_bytes: int, seconds: float
    ) -> None:  # fmt: skip
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.tokens += tokens
        self.needed += uses.needed
        self.hits += uses.hits
        self.by_host += uses.by_host
        self.read_through_bytes += read_through_bytes
        self.h2d_bytes += h2d_bytes
        self.seconds += seconds

    def add(self, other: Meter) -> None:
        """Everything `other` counted."""
        for name in (each.name for each in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                mine.update({key: mine.get(key, 0) + value for key, value in theirs.items()})
            else:
                setattr(self, name, mine + theirs)

    def add_waited(self, nanoseconds: int, gave_up: int) -> None:
        """What kernels waited for copies; one that gave up has read what was there."""
        if gave_up:
            raise RuntimeError(
                "a copy did not arrive in 20 s: the link or its driver is stuck; nothing of this round is used"
            )
        if nanoseconds:
            self.busy_ms["stall"] = self.busy_ms.get("stall", 0.0) + nanoseconds * 1e-6

    def add_spans(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self.busy_ms[span.work] = self.busy_ms.get(span.work, 0.0) + span.end_ms - span.start_ms

    @property
    def acceptance(self) -> float:
        """Accepted over proposed."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else float("nan")


def decode(
    session: Session, memory: ExpertMemory, prefetcher: Prefetcher, depth: DepthController, prompt: Tensor, *,
    new_tokens: int, generator: Generator, meter: Meter, on_round: OnRound | None = None,
) -> Iterator[list[int]]:  # fmt: skip
    """Committed tokens, round by round, until there are `new_tokens`; the last round may bring more.

    Args:
        prompt: [P] token ids, P at least 2.
        generator: of sampling, on the device; unused when the session is greedy.
        on_round: told of every round's routing and work, outside the time that is measured.
    """
    begin(session, memory, prefetcher, [prompt])
    done = 0
    while done < new_tokens:
        k = min(depth.next_depth(), session.depth)
        session.prepare(k)
        played = play_round(session, memory, prefetcher, k, [k], [generator], meter)
        ((accepted, committed),) = played.committed
        depth.observe(k, accepted, played.seconds * 1e3)
        if on_round is not None:
            on_round(RoundRouting(accepted, *played.routed.first(k), played.used), played.spans)
        done += len(committed)
        yield committed
    meter.counters |= memory.counters


def begin(
    session: Session, memory: ExpertMemory, prefetcher: Prefetcher, prompts: Sequence[Tensor], first_lane: int = 0
) -> None:
    """Read prompts [P] into neighbouring lanes: for the prefetcher a round without a draft, which ends what it planned before."""
    memory.load(prefetcher.begin(memory.slots, 0, memory.clock()))
    session.begin(prompts, first_lane)
    session.target_experts.end_pass(np.empty((len(memory.slots.count), 0, memory.shape.top_k), np.int64))
    memory.watch.wait()
    memory.watch.start()


@dataclass(frozen=True)
class Played:
    """What a round brought."""

    committed: list[tuple[int, list[int]]]  # per lane: drafted tokens accepted, and tokens added
    routed: Routing  # of the draft
    used: np.ndarray  # [L, T, k] by the target, of the tokens that count
    spans: list[Span]
    seconds: float


def play_round(
    session: Session, memory: ExpertMemory, prefetcher: Prefetcher, k: int, depths: Sequence[int],
    generators: Sequence[Generator | None], meter: Meter,
) -> Played:  # fmt: skip
    """Draft `k` tokens, verify, accept: one round of every lane.

    Args:
        depths: [B] drafted tokens of each lane that count, at most k; NO_REQUEST for a free lane.
        generators: [B] of sampling, on the device; unused when the session is greedy.
    """
    began, copied = time.perf_counter(), memory.h2d_bytes
    session.draw(generators, k)
    routed = propose(session, memory, prefetcher, k)
    with memory.watch.stretch("compute", "verify"):
        verified = session.verify(k, prefetcher.rest(memory.clock()))
    memory.watch.wait()  # the round's one wait for what it computes
    committed, used = verified.committed(), counting(verified.used.numpy())
    meter.add_waited(*verified.waited.tolist())
    uses = session.target_experts.end_pass(used)
    spans = memory.watch.ended()
    meter.add_spans(spans)
    elapsed = time.perf_counter() - began
    meter.add_round(
        sum(max(0, depth) for depth in depths), sum(accepted for accepted, _ in committed), sum(len(new) for _, new in committed),
        uses, uses.read_through * memory.host[0, 0].nbytes, memory.h2d_bytes - copied, elapsed,
    )  # fmt: skip
    return Played(committed, routed, used, spans, elapsed)


def counting(used: np.ndarray) -> np.ndarray:
    """Experts [L, T, k] of the tokens that count."""
    return np.ascontiguousarray(used[:, used[0, :, 0] != NOT_NOW])


def propose(session: Session, memory: ExpertMemory, prefetcher: Prefetcher, depth: int) -> Routing:
    """Draft `depth` tokens into the session's windows; while a step runs, plan with the routing of the one before: of all
    lanes together."""
    memory.load(prefetcher.begin(memory.slots, depth, memory.clock()))
    routed = Routing(session)
    for step in range(depth):
        with memory.watch.stretch("compute", "draft step"):
            session.draft_step()
        routed.fetch(step)
        if step:
            plan(memory, prefetcher, routed, step)
    if depth:
        plan(memory, prefetcher, routed, depth)
        memory.load(prefetcher.finish(memory.clock()))
    return routed


def plan(memory: ExpertMemory, prefetcher: Prefetcher, routed: Routing, step: int) -> None:
    """Let the policy learn the routing of draft step 1..K, and begin the copies it wants."""
    experts, weights = routed.of(step - 1)
    prefetcher.observe_step(routed.step_ms)
    copied = memory.h2d_bytes
    copies = memory.load(prefetcher.drafted(step, experts, weights, memory.clock()))
    prefetcher.observe_copy(memory.h2d_bytes - copied, copies * memory.transport.copy_ms)


class Routing:
    """The draft's routing on its way to the host, one step at a time."""

    def __init__(self, session: Session) -> None:
        self._session, on_gpu = session, session.window.is_cuda
        make = (lambda t: torch.empty_like(t, device="cpu", pin_memory=True)) if on_gpu else (lambda t: t)
        self._experts, self._weights = make(session.drafted), make(session.drafted_weights)
        self._events = [torch.cuda.Event() for _ in range(len(session.drafted))] if on_gpu else None
        self._since, self.step_ms = time.perf_counter(), 0.0  # the last step that was asked for took so long

    def fetch(self, step: int) -> None:
        if self._events:
            self._experts[step].copy_(self._session.drafted[step], non_blocking=True)
            self._weights[step].copy_(self._session.drafted_weights[step], non_blocking=True)
            self._events[step].record()

    def of(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Experts and weights of one step, [B, L, k] each, of lanes that drafted."""
        if self._events:
            self._events[step].synchronize()
        now = time.perf_counter()
        self._since, self.step_ms = now, (now - self._since) * 1e3
        experts, weights = self._experts[step].numpy(), self._weights[step].numpy()
        drafted = experts[:, 0, 0] != NOT_NOW
        return experts[drafted], weights[drafted]

    def first(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of what the first steps of the first lane used, [K, L, k] each."""
        return self._experts[:steps, 0].numpy().copy(), self._weights[:steps, 0].numpy().copy()
