"""An offloading system in virtual time: recorded routing + a machine's numbers + a policy -> times, hits and bytes.

One round, on the streams of `plan.streams`:

    compute   draft draft draft draft | layer 0: attention, hits .. misses | layer 1: ...       -> commit
    d2h            r     r     r     r                    r                             r
    h2d              [plan: copies ...       copies]       [layer 0's misses]            [layer 1's misses]

r is routing on its way to the host, which plans and loads: of every drafted token, and of every layer where the host has to act
on misses. The CPU computes experts under some policies. The disk is read before the copy of an expert for which host memory has
no room (`StepCosts.placed`).

Everything decided on the way (what to copy, whom to evict, how deep to draft) is decided by the functions in `plan/` that
an engine calls as well. All times are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from specter_lab.errors import UserError
from specter_lab.plan import serve as counted
from specter_lab.plan.budget import gpu_bytes
from specter_lab.plan.hits import Hits
from specter_lab.plan.policy import Clock, Loads, Policy, Prefetcher, Scene, Scores
from specter_lab.plan.residency import Slots, new_slots, rescore
from specter_lab.plan.serve import BY_HOST, LOAD, NOTHING_AHEAD, Ahead, Meter, Needs, new_meter, prefetch, serve
from specter_lab.plan.streams import (
    COMPUTE,
    D2H,
    DENSE,
    DRAFT,
    H2D,
    NOBODY,
    ROUTING,
    Span,
    Streams,
    new_streams,
    run,
    spans,
)
from specter_lab.plan.workload import Round, Workload

LOG_ROWS = 1 << 20  # of recorded work; later work is left out


class DepthControl(Protocol):
    """Who says how many tokens to draft."""

    def next_depth(self) -> int: ...

    def observe(self, depth: int, accepted: int, round_ms: float) -> None: ...


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
        """Share of the copies' time during which compute did not wait for them; NaN without copies.

        Waiting begins when a layer's routing is known on the GPU, so what the host, a disk or the CPU take longer counts as well;
        0 where all of that is more than the copies' time.
        """
        h2d_ms = self.rounds.h2d_ms.sum()
        return max(0.0, 1 - float(self.rounds.stall_ms.sum() / h2d_ms)) if h2d_ms else float("nan")

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
    draft_meter: Meter  # of a draft that reads the target's experts; stalls are counted together
    prefetcher: Prefetcher
    scores: Scores | None
    draft_uses: int = 0

    def clock(self, now_ms: float | None = None) -> Clock:
        free = self.streams.free_ms
        return Clock(float(free[COMPUTE] if now_ms is None else now_ms), float(free[H2D]), self.scene.costs.pace_ms)

    def ask(self, loads: Loads, clock: Clock) -> None:
        """Begin the copies that the prefetcher wanted when it was asked."""
        if len(loads[0]):
            costs = self.scene.costs
            begun = prefetch(self.slots, self.streams, self.meter, costs.copy_ms, costs.disk, clock.now_ms, *loads)
            self.prefetcher.observe_copy(begun * costs.link_bytes, begun * costs.pace_ms)

    def moved_bytes(self) -> float:
        """What has crossed the link, as copies or read by kernels."""
        costs, ours = self.scene.costs, self.meter.counts
        copies = ours[counted.COPIES] + self.draft_meter.counts[counted.COPIES]
        return copies * costs.link_bytes + ours[counted.READ_THROUGH_MISSES] * costs.expert_bytes

    def hits(self) -> Hits:
        uses, ready = self.draft_meter.counts[[counted.USES, counted.USES_READY]].tolist()
        resident = self.draft_uses - uses  # of an INT4 draft
        return Hits(self.meter.counts, self.meter.weights, self.draft_uses, resident + ready)


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

    Slots may be fewer than the experts of one window, or of one token: then the experts of a layer take turns in them, each miss
    waiting until one in use has been computed, and plans pin no more than there are slots. Only a layer without any slot
    is refused.

    Args:
        workload: windows of the policy's draft (`policy.draft`), stretched to the model of `scene`.
        new_tokens: tokens per request, at most the recorded positions.
        control: decides the depth of every round; default: `policy.depth_in(scene)` always.
        requests: rows of the workload, in order; default: all.
        record: keep the spans of all streams.

    Raises:
        UserError: a layer has no slot, windows of another model or kind of draft, more tokens or depth than were recorded or
            less than none, a batch without requests, or requests that there are not.
    """
    everyone = list(range(workload.requests)) if requests is None else list(requests)
    _check(workload, policy, scene, new_tokens, batch, everyone)
    state = _begin(policy, scene, batch, record)
    if state.scores is not None:
        state.scores.foresee(everyone, new_tokens, batch)
    commits: dict[int, list[tuple[float, int]]] = {request: [] for request in everyone}
    began, ttft, rounds = {}, {}, []
    for first in range(0, len(everyone), batch):
        active = everyone[first : first + batch]
        arrived = state.streams.free_ms[COMPUTE]
        began_ms = _prefill(state, active, workload.prefill(active))
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
    return Simulation(policy.id, RoundTimes(*columns), commits, began, ttft, state.hits(), spans(state.streams))


def _check(
    workload: Workload, policy: Policy, scene: Scene, new_tokens: int, batch: int, requests: Sequence[int]
) -> None:
    """Refuse what cannot be simulated. Depths, which a controller may give, are checked round by round (`Workload.round`)."""
    windows, model = workload.windows, scene.costs.model
    ours, theirs = (workload.layers, workload.num_experts), (model.moe_layers, model.num_experts)
    if ours != theirs:
        raise UserError(f"the workload has {ours[0]} MoE layers of {ours[1]} experts, {model.name} has {theirs[0]} of {theirs[1]}: "
                        f"make it with `workload_for` that model")  # fmt: skip
    if not 1 <= new_tokens <= windows.positions:
        raise UserError(f"{new_tokens} new tokens were asked for, the windows hold {windows.positions}: give 1 to {windows.positions}")  # fmt: skip
    if batch < 1:
        raise UserError(f"a batch of {batch} requests decodes nothing: give 1 or more")
    if not requests or not all(0 <= request < workload.requests for request in requests):
        raise UserError(f"requests {list(requests)} were asked for: name some of 0 to {workload.requests - 1}, those in the windows")  # fmt: skip
    if len(set(requests)) < len(requests):
        raise UserError(f"requests {list(requests)} name one twice: a request is decoded once, leave the other out")
    if policy.draft is not None and model.top_k > 1 and workload.fewer != (policy.draft == "fewer"):
        raise UserError(f"policy '{policy.id}' drafts with {policy.draft!r}, the windows' draft used "
                        f"{windows.draft.shape[-1]} of {model.top_k} experts: record them with that draft")  # fmt: skip


def _begin(policy: Policy, scene: Scene, batch: int, record: bool) -> _Run:
    count = policy.slots(scene)
    if count.min() < 1:
        raise UserError(f"a budget of {scene.slots_per_layer} slots per layer leaves layer {int(count.argmin())} none: "
                        f"an expert has to be somewhere while it computes, so every layer needs 1")  # fmt: skip
    scene = replace(scene, costs=scene.costs.placed(gpu_bytes(policy, scene, count, batch)))
    slots = new_slots(count, scene.num_experts, policy.order)
    meter, other = new_meter(*slots.slot_of.shape), new_meter(*slots.slot_of.shape)
    draft_meter = other._replace(stall_ms=meter.stall_ms, fetched=meter.fetched)
    scores = None if policy.scores is None else policy.scores(scene)
    streams = new_streams(LOG_ROWS if record else 0)
    return _Run(policy, scene, slots, streams, meter, draft_meter, policy.prefetch(scene), scores)


def _prefill(state: _Run, active: Sequence[int], needs: Needs) -> float:
    """Read prompts; returns the event of its end. Its copies are copies, but no prefetches of a round."""
    prefetched = state.meter.counts[counted.PREFETCHED]
    clock = state.clock()
    state.ask(state.prefetcher.begin(state.slots, 0, clock), clock)
    end = _target_pass(state, active, needs, counted_pass=False)
    state.meter.counts[counted.PREFETCHED] = prefetched
    return end


def _round(state: _Run, active: Sequence[int], now: Round) -> tuple[float, ...]:
    """Draft, prefetch, verify: a row of `RoundTimes`."""
    streams, meter, prefetcher = state.streams, state.meter, state.prefetcher
    start, stall_ms, h2d_ms, moved = (
        streams.free_ms[COMPUTE],
        meter.stall_ms[0],
        streams.busy_ms[H2D],
        state.moved_bytes(),
    )
    meter.fetched[:] = False
    prefetcher.foresee(now.needs)
    clock = state.clock()
    state.ask(prefetcher.begin(state.slots, now.depth, clock), clock)
    known_ms = start
    for step in range(now.depth):
        prefetcher.observe_step(_draft_step(state, now, step))
        known_ms = _tell_routing(state, now, step)
        clock = state.clock(known_ms)
        state.ask(prefetcher.drafted(step + 1, now.drafted[step], now.drafted_weights[step], clock), clock)
    clock = state.clock(known_ms)
    state.ask(prefetcher.finish(clock), clock)
    state.draft_uses += sum(drafted.size for drafted in now.drafted)
    drafted = streams.free_ms[COMPUTE]
    end = _target_pass(state, active, now.needs)
    tokens = sum(now.accepted) + len(now.accepted)
    stall_ms, h2d_ms = meter.stall_ms[0] - stall_ms, streams.busy_ms[H2D] - h2d_ms
    return start, drafted, end, now.depth, tokens, stall_ms, h2d_ms, state.moved_bytes() - moved


def _tell_routing(state: _Run, now: Round, step: int) -> float:
    """The event at which the host knows what the drafted tokens of a step use; nobody is told where nobody asks."""
    ended_ms = state.streams.free_ms[COMPUTE]
    if type(state.prefetcher).drafted is Prefetcher.drafted:
        return ended_ms
    tokens, layers = now.drafted[step].shape[:2]
    routing_ms = state.scene.costs.routing_ms(tokens if now.draft_reads is None else now.draft_reads[step][0], layers)
    return run(state.streams, D2H, routing_ms, ended_ms, ROUTING, NOBODY, NOBODY)


def _draft_step(state: _Run, now: Round, step: int) -> float:
    """Draft one token per request, or read nodes of a tree; returns what that took.

    A draft of the target's own experts finds or loads them.
    """
    streams, costs = state.streams, state.scene.costs
    if now.draft_needs is None:
        ms = costs.draft_step_ms if now.draft_reads is None else costs.draft_pass_ms(*now.draft_reads[step])
        run(streams, COMPUTE, ms, 0.0, DRAFT, NOBODY, NOBODY)
        return ms
    start, model, of_pass = streams.free_ms[COMPUTE], costs.model, costs.of_pass(len(now.accepted))
    run(streams, COMPUTE, (model.layers - model.moe_layers) * of_pass.layer_ms, 0.0, DENSE, NOBODY, NOBODY)
    needs, layers = now.draft_needs[step], model.moe_layers
    serve(state.slots, streams, state.draft_meter, of_pass, needs, NOTHING_AHEAD, LOAD, True, 0, layers, True)
    return streams.free_ms[COMPUTE] - start


def _target_pass(state: _Run, active: Sequence[int], needs: Needs, counted_pass: bool = True) -> float:
    """One pass of the target; returns the event of its end."""
    policy, streams, model = state.policy, state.streams, state.scene.costs.model
    tokens = needs.token_experts.shape[1]
    costs = state.scene.costs.of_pass(tokens)
    if policy.verify_experts is not None and counted_pass:
        needs = _heaviest(needs, policy.verify_experts(state.scene), state.meter)
    if state.scores is not None and (score := state.scores.update(active, needs)) is not None:
        rescore(state.slots, score)
    if policy.barrier:
        state.meter.stall_ms[0] += max(0.0, streams.free_ms[H2D] - streams.free_ms[COMPUTE])
        streams.free_ms[COMPUTE] = max(streams.free_ms[COMPUTE], streams.free_ms[H2D])
    run(streams, COMPUTE, (model.layers - model.moe_layers) * costs.layer_ms, 0.0, DENSE, NOBODY, NOBODY)
    ahead, asks = state.prefetcher.ahead(needs), type(state.prefetcher).verifying is not Prefetcher.verifying
    told = asks or policy.miss in BY_HOST or costs.disk.read_ms > 0 or _waits_for_routing(ahead)
    arguments = (state.slots, streams, state.meter, costs, needs, ahead, policy.miss, told)
    if not asks:
        return serve(*arguments, 0, model.moe_layers, counted_pass)
    for layer in range(model.moe_layers):
        serve(*arguments, layer, layer + 1, counted_pass)
        clock = state.clock(streams.free_ms[D2H])  # the host has just learnt this layer's routing
        state.ask(state.prefetcher.verifying(layer, needs.token_experts[layer], clock), clock)
    return streams.free_ms[COMPUTE]


def _waits_for_routing(ahead: Ahead) -> bool:
    return len(ahead.known) > 0 and bool(ahead.known[-1] >= 0)


def _heaviest(needs: Needs, limit: int, meter: Meter) -> Needs:
    """Only the `limit` experts of every layer with the largest summed routing weights; changes the output."""
    layer = np.repeat(np.arange(len(needs.first) - 1), np.diff(needs.first))
    order = np.lexsort((needs.experts, -needs.weights, layer))
    rank = np.arange(len(order)) - needs.first[layer[order]]
    kept = np.sort(order[rank < limit])
    meter.counts[counted.DROPPED] += len(order) - len(kept)
    meter.weights[counted.WEIGHT_DROPPED] += needs.weights.sum() - needs.weights[kept].sum()
    first = np.searchsorted(layer[kept], np.arange(len(needs.first)))
    return Needs(first, needs.experts[kept], needs.uses[kept], needs.weights[kept], needs.token_experts)
