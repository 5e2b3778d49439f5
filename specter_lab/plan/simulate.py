"""An offloading system in virtual time: recorded routing + a machine's numbers + a policy -> times, hits and bytes.

One round, on the streams of `plan.streams`:

    compute   draft draft draft draft | layer 0: attention, hits .. misses | layer 1: ...       -> commit
    h2d             [plan: copies ...       copies] [layer 0's misses]       [layer 1's misses]

Everything decided on the way (what to copy, whom to evict, how deep to draft) is decided by the functions in `plan/` that
an engine calls as well. All times are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specter_lab.errors import UserError
from specter_lab.plan import serve as counted
from specter_lab.plan.policy import Clock, Loads, Policy, Prefetcher, Scene, Scores
from specter_lab.plan.residency import Slots, new_slots, rescore
from specter_lab.plan.serve import NUM_COUNTS, Meter, Needs, prefetch, serve
from specter_lab.plan.streams import COMPUTE, DENSE, DRAFT, H2D, NOBODY, Span, Streams, new_streams, run, spans
from specter_lab.plan.workload import Round, Workload

LOG_ROWS = 1 << 20  # of recorded work; later work is left out


class DepthControl(Protocol):
    """Who says how many tokens to draft."""

    def next_depth(self) -> int: ...

    def observe(self, depth: int, accepted: int, round_ms: float) -> None: ...


@dataclass(frozen=True)
class Hits:
    """Counts behind every definition of a hit rate, over all target passes but prefills.

    An expert is *ready* when its copy has ended before its layer asks, *in flight* when it is on its way then.
    """

    counts: np.ndarray  # [NUM_COUNTS], rows as named in `plan.serve`
    draft_uses: int  # the draft's own uses of experts, all in GPU memory

    def rates(self) -> dict[str, float]:
        """Hit rate by definition; NaN where nothing was asked for."""
        c = counted
        needed, needed_ready, needed_coming = self.counts[[c.NEEDED, c.NEEDED_READY, c.NEEDED_IN_FLIGHT]].tolist()
        uses, uses_ready, uses_coming = self.counts[[c.USES, c.USES_READY, c.USES_IN_FLIGHT]].tolist()
        steps, steps_ready = self.counts[[c.TOKEN_LAYERS, c.TOKEN_LAYERS_READY]].tolist()
        pairs = {
            "distinct": (needed_ready, needed),
            "distinct, in flight counted": (needed_ready + needed_coming, needed),
            "token-weighted": (uses_ready, uses),
            "token-weighted, in flight counted": (uses_ready + uses_coming, uses),
            "token-step": (steps_ready, steps),
            "token-weighted, draft counted": (uses_ready + self.draft_uses, uses + self.draft_uses),
        }
        return {name: found / total if total else float("nan") for name, (found, total) in pairs.items()}


@dataclass(frozen=True)
class RoundTimes:
    """Rounds in the order they ran; arrays [N]."""

    start_ms: np.ndarray
    drafted_ms: np.ndarray  # the draft ended
    end_ms: np.ndarray
    depth: np.ndarray
    tokens: np.ndarray  # committed, all requests of the batch
    stall_ms: np.ndarray  # compute waited for copies
    h2d_ms: np.ndarray
    h2d_bytes: np.ndarray


@dataclass(frozen=True)
class Simulation:
    """What came out. Times are simulated."""

    policy: str
    rounds: RoundTimes
    commits: dict[int, list[tuple[float, int]]]  # request -> (end of a round in ms, tokens it committed)
    began_ms: dict[int, float]  # request -> its prefill ended, decoding begins
    ttft_ms: dict[int, float]  # request -> from its prompt to its first token
    hits: Hits
    spans: list[Span]

    @property
    def hidden_share(self) -> float:
        """Share of the copies' time during which compute did not wait for them."""
        return 1 - float(self.rounds.stall_ms.sum() / self.rounds.h2d_ms.sum())

    def tpot_ms(self, new_tokens: int) -> dict[str, float]:
        """TPOT by definition, mean over requests; see `plan.depth` for "paper", "steady" and "decode"."""
        rows = []
        for request, commits in self.commits.items():
            ends, tokens = np.array([end for end, _ in commits]), np.array([count for _, count in commits])
            first, last, began = ends[0], ends[-1], self.began_ms[request]
            steady = (last - first) / tokens[1:].sum() if len(ends) > 1 else (last - began) / tokens.sum()
            rows.append(((last - first) / (new_tokens - 1), steady, (last - began) / new_tokens))
        return dict(zip(("paper", "steady", "decode"), np.mean(rows, axis=0).tolist()))

    @property
    def tokens_per_s(self) -> float:
        """All committed tokens over the time from the first round's start to the last one's end."""
        return float(self.rounds.tokens.sum() / np.sum(self.rounds.end_ms - self.rounds.start_ms) * 1e3)


@dataclass
class _Run:
    """The state of a simulation."""

    policy: Policy
    scene: Scene
    slots: Slots
    streams: Streams
    meter: Meter
    prefetcher: Prefetcher
    scores: Scores | None
    draft_uses: int = 0

    def clock(self) -> Clock:
        free = self.streams.free_ms
        return Clock(float(free[COMPUTE]), float(free[H2D]), self.scene.costs.copy_ms)

    def ask(self, loads: Loads) -> None:
        """Begin the copies that the prefetcher wants."""
        if len(loads[0]):
            costs = self.scene.costs
            begun = prefetch(self.slots, self.streams, self.meter, costs.copy_ms, *loads)
            self.prefetcher.observe_copy(begun * costs.expert_bytes, begun * costs.copy_ms)


def simulate(
    workload: Workload,
    policy: Policy,
    scene: Scene,
    *,
    new_tokens: int,
    batch: int = 1,
    control: DepthControl | None = None,
    requests: Sequence[int] | None = None,
    record: bool = False,
) -> Simulation:
    """Decode `new_tokens` tokens of every request, `batch` at a time; slots stay filled from one to the next.

    Args:
        workload: windows of the policy's draft (`policy.draft`), stretched to the model of `scene`.
        new_tokens: tokens per request, at most the recorded positions.
        control: decides the depth of every round; default: `policy.depth_in(scene)` always.
        requests: rows of the workload, in order; default: all.
        record: keep the spans of all streams.

    Raises:
        UserError: a layer has no slot, or more tokens or depth are asked for than were recorded.
    """
    if new_tokens > workload.windows.positions:
        raise UserError(f"{new_tokens} new tokens were asked for, the windows hold {workload.windows.positions}")
    state = _begin(policy, scene, record)
    everyone = list(range(workload.requests)) if requests is None else list(requests)
    commits: dict[int, list[tuple[float, int]]] = {request: [] for request in everyone}
    began, ttft, rounds = {}, {}, []
    for first in range(0, len(everyone), batch):
        active = everyone[first : first + batch]
        arrived = state.streams.free_ms[COMPUTE]
        state.prefetcher.begin(state.slots, 0, state.clock())
        began_ms = _target_pass(state, active, workload.prefill(active), counted=False)
        position = dict.fromkeys(active, 0)
        while active:
            depth = policy.depth_in(scene) if control is None else control.next_depth()
            now = workload.round(active, [position[request] for request in active], depth)
            times = _round(state, active, now)
            rounds.append(times)
            for request, accepted in zip(active, now.accepted):
                if not commits[request]:
                    began[request], ttft[request] = began_ms, times[2] - arrived
                commits[request].append((times[2], accepted + 1))
                position[request] += accepted + 1
            if control is not None:
                control.observe(depth, sum(now.accepted) // len(active), times[2] - times[0])
            active = [request for request in active if position[request] < new_tokens]
    columns = (np.array(column) for column in zip(*rounds))
    hits = Hits(state.meter.counts, state.draft_uses)
    return Simulation(policy.id, RoundTimes(*columns), commits, began, ttft, hits, spans(state.streams))


def _begin(policy: Policy, scene: Scene, record: bool) -> _Run:
    count = policy.slots(scene)
    if count.min() < 1:
        raise UserError(f"a budget of {scene.slots_per_layer} slots per layer leaves layer {int(count.argmin())} none: "
                        f"an expert has to be somewhere while it computes, so every layer needs 1")  # fmt: skip
    slots = new_slots(count, scene.num_experts, policy.order)
    meter = Meter(np.zeros(NUM_COUNTS, np.int64), np.zeros(1), np.zeros(slots.slot_of.shape, np.bool_))
    scores = None if policy.scores is None else policy.scores(scene)
    return _Run(policy, scene, slots, new_streams(LOG_ROWS if record else 0), meter, policy.prefetch(scene), scores)


def _round(state: _Run, active: Sequence[int], now: Round) -> tuple[float, ...]:
    """Draft, prefetch, verify: a row of `RoundTimes`."""
    streams, meter, prefetcher, costs = state.streams, state.meter, state.prefetcher, state.scene.costs
    start, stall_ms, h2d_ms = streams.free_ms[COMPUTE], meter.stall_ms[0], streams.busy_ms[H2D]
    copies = meter.counts[counted.COPIES] + meter.counts[counted.READ_THROUGH_MISSES]
    meter.fetched[:] = False
    state.ask(prefetcher.begin(state.slots, now.depth, state.clock()))
    for step in range(now.depth):
        run(streams, COMPUTE, costs.draft_step_ms, 0.0, DRAFT, NOBODY, NOBODY)
        prefetcher.observe_step(costs.draft_step_ms)
        state.ask(prefetcher.drafted(step + 1, now.drafted[step], now.drafted_weights[step], state.clock()))
    state.ask(prefetcher.finish(state.clock()))
    state.draft_uses += now.drafted.size
    drafted = streams.free_ms[COMPUTE]
    end = _target_pass(state, active, now.needs)
    tokens = sum(now.accepted) + len(now.accepted)
    moved = meter.counts[counted.COPIES] + meter.counts[counted.READ_THROUGH_MISSES] - copies
    stall_ms, h2d_ms = meter.stall_ms[0] - stall_ms, streams.busy_ms[H2D] - h2d_ms
    return start, drafted, end, now.depth, tokens, stall_ms, h2d_ms, moved * costs.expert_bytes


def _target_pass(state: _Run, active: Sequence[int], needs: Needs, counted: bool = True) -> float:
    """One pass of the target; returns the event of its end."""
    policy, streams, model = state.policy, state.streams, state.scene.costs.model
    tokens = needs.token_experts.shape[1]
    costs = state.scene.costs.of_pass(tokens)
    if policy.verify_experts is not None and counted:
        needs = heaviest(needs, policy.verify_experts(state.scene))
    if state.scores is not None and (score := state.scores.update(active, needs)) is not None:
        rescore(state.slots, score)
    if policy.barrier:
        state.meter.stall_ms[0] += max(0.0, streams.free_ms[H2D] - streams.free_ms[COMPUTE])
        streams.free_ms[COMPUTE] = max(streams.free_ms[COMPUTE], streams.free_ms[H2D])
    run(streams, COMPUTE, (model.layers - model.moe_layers) * costs.layer_ms, 0.0, DENSE, NOBODY, NOBODY)
    arguments = (state.slots, streams, state.meter, costs, needs, policy.miss)
    if type(state.prefetcher).verifying is Prefetcher.verifying:
        return serve(*arguments, 0, model.moe_layers, counted)
    for layer in range(model.moe_layers):
        serve(*arguments, layer, layer + 1, counted)
        state.ask(state.prefetcher.verifying(layer, needs.token_experts[layer], state.clock()))
    return streams.free_ms[COMPUTE]


def heaviest(needs: Needs, limit: int) -> Needs:
    """Only the `limit` experts of every layer with the largest summed routing weights; changes the output."""
    layer = np.repeat(np.arange(len(needs.first) - 1), np.diff(needs.first))
    order = np.lexsort((needs.experts, -needs.weights, layer))
    rank = np.arange(len(order)) - needs.first[layer[order]]
    kept = np.sort(order[rank < limit])
    first = np.searchsorted(layer[kept], np.arange(len(needs.first)))
    return Needs(first, needs.experts[kept], needs.uses[kept], needs.weights[kept], needs.token_experts)
