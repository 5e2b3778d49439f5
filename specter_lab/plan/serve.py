"""One target pass over the layers, in virtual time: the hot loop of the simulator, compiled.

In every layer attention and router come first; then the experts that are there compute while those that are not are copied,
each computing when it arrives. Experts in use are never evicted: when every slot is taken by this layer, the next
copy waits for the first expert that is done (Specter, sections PIO and SEE).

Who loads a miss decides when its copy may begin. Residents are found by a table on the GPU, so hits never wait for the host;
but a copy is the host's to begin, and it knows of a miss only when the layer's routing has reached it: one small copy on the
D2H stream. Kernels that read through, load by themselves or fall back on the draft's weights do without. An expert that the host's memory does
not hold is read from disk first, and crosses the link when it has been read.

Where a layer needs more than its slots, a host that loads works in turns, as the engine does: first whoever is there, then one half
of the slots computes while the other is filled. A turn gives up its slots all at once, `PassCosts.turn_ms` after the last of it has
been computed; so long the GPU also takes to get at rows that the host's cores have computed. Who computes a miss is decided before
any of that, by the copies that are queued when the host hears of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specter_lab.compiled import compiled
from specter_lab.plan.residency import ABSENT, NONE, Slots, of_a_turn, release, release_all, reserve, use
from specter_lab.plan.streams import (
    ATTENTION,
    COMPUTE,
    CPU,
    CPU_EXPERT,
    D2H,
    DISK,
    DISK_READ,
    EXPERT,
    H2D,
    MISS,
    NOBODY,
    PREFETCH,
    RESIDENT,
    ROUTING,
    ZERO_COPY,
    Streams,
    run,
)

# What happens to an expert that is not there.
LOAD = 0  # copied into a slot, then computed
CPU_IF_SOONER = 1  # computed by the host's cores when that ends before a copy would
READ_THROUGH = 2  # read from host memory by the kernel itself; takes no slot
DRAFT_WEIGHTS = 3  # computed with the draft's INT4 weights: changes the output
CPU_IF_SHORTER = 4  # computed by the host's cores when that takes less than a copy, whatever is queued
ADMIT = 5  # loaded into a slot by a kernel, which the host need not be told of
BY_KERNEL = (READ_THROUGH, ADMIT)
BY_HOST = (LOAD, CPU_IF_SOONER, CPU_IF_SHORTER)  # the host acts on a miss, so it has to be told of it

# Rows of `counts`.
NEEDED, NEEDED_READY, NEEDED_IN_FLIGHT = 0, 1, 2  # distinct experts per layer and pass
USES, USES_READY, USES_IN_FLIGHT = 3, 4, 5  # one token's use of one expert
TOKEN_LAYERS, TOKEN_LAYERS_READY = 6, 7  # one token in one layer; all its experts ready
COPIES, READ_THROUGH_MISSES, CPU_MISSES, DRAFT_WEIGHT_MISSES = 8, 9, 10, 11
PREFETCHED, PREFETCHED_USED, PREFETCH_REFUSED = 12, 13, 14
DROPPED = 15  # distinct experts per layer and pass that were needed and left out
NUM_COUNTS = 16

# Rows of `weights`: sums of routing weights.
WEIGHT, WEIGHT_DROPPED, WEIGHT_IN_DRAFT_PRECISION = range(3)

AHEAD_COPIES = 2  # copies on their way at once: enough to keep the link busy, few enough not to delay the next miss


class Disk(NamedTuple):
    """The experts of every layer that host memory does not hold: those from number `first` on."""

    first: int
    read_ms: float  # one of them, to host memory
    pace_ms: float  # the mean over all experts of a layer


class PassCosts(NamedTuple):
    """Times in ms for a pass of a certain number of tokens."""

    layer_ms: float  # all of a layer but routed experts
    read_ms: float  # one expert from GPU memory
    flop_ms: float  # one token through one expert
    launch_ms: float  # per expert, when experts are launched one by one
    copy_ms: float  # one expert, host to GPU
    read_through_ms: float  # one expert, read from host memory by a kernel
    cpu_read_ms: float  # one expert from host memory to the host's cores
    cpu_flop_ms: float  # one token through one expert there
    routing_ms: float  # a layer's routing, GPU to host
    turn_ms: float  # from the end of a turn to the next copy; 0: slots are given up one by one, with no turns
    disk: Disk


class Needs(NamedTuple):
    """What a pass over T tokens needs of L layers; a layer's experts are rows first[l] .. first[l + 1]."""

    first: np.ndarray  # [L + 1]
    experts: np.ndarray  # [M] distinct, ascending within a layer
    uses: np.ndarray  # [M] tokens that use each
    weights: np.ndarray  # [M] sums of routing weights
    token_experts: np.ndarray  # [L, T, k] experts of every token


class Ahead(NamedTuple):
    """Copies to begin while a pass runs, as fast as the link drains them; one whose layer has come is left out."""

    known: np.ndarray  # [M] the layer whose routing tells that this one is wanted, ascending; -1: known before the pass
    layers: np.ndarray  # [M]
    experts: np.ndarray  # [M] a resident one is kept there


NOTHING_AHEAD = Ahead(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


class Meter(NamedTuple):
    """What is counted on the way."""

    counts: np.ndarray  # [NUM_COUNTS] int64
    weights: np.ndarray  # [3] float64
    stall_ms: np.ndarray  # [1] compute waited for an expert
    fetched: np.ndarray  # [L, E] bool, prefetched since the round began


def new_meter(layers: int, num_experts: int) -> Meter:
    """Nothing counted."""
    return Meter(np.zeros(NUM_COUNTS, np.int64), np.zeros(3), np.zeros(1), np.zeros((layers, num_experts), np.bool_))


@compiled
def experts_ms(costs: PassCosts, experts: int, uses: int) -> float:
    """Experts that lie in GPU memory, in one go."""
    return max(experts * costs.read_ms, uses * costs.flop_ms, experts * costs.launch_ms)


@compiled
def ends_sooner_by_cpu(cpu_free_ms: float, cpu_ms: float, link_free_ms: float, copy_ms: float) -> bool:
    """Whether the host's cores end an expert before its copy would."""
    return cpu_free_ms + cpu_ms < link_free_ms + copy_ms


@compiled
def sooner_by_cpu(count: int, link_free_ms: float, copy_ms: float, cpu_ms: float) -> np.ndarray:
    """Which of `count` misses in a row the host's cores, idle now, should compute: [count] bool."""
    chosen, cpu_free_ms = np.zeros(count, np.bool_), 0.0
    for miss in range(count):
        chosen[miss] = ends_sooner_by_cpu(cpu_free_ms, cpu_ms, link_free_ms, copy_ms)
        if chosen[miss]:
            cpu_free_ms += cpu_ms
        else:
            link_free_ms += copy_ms
    return chosen


@compiled
def in_host_memory(streams: Streams, disk: Disk, asked: float, layer: int, expert: int) -> float:
    """The event from which an expert can be copied: `asked` where host memory holds it, else the end of its read."""
    return run(streams, DISK, disk.read_ms, asked, DISK_READ, layer, expert) if expert >= disk.first else asked


@compiled
def prefetch(
    slots: Slots, streams: Streams, meter: Meter, copy_ms: float, disk: Disk, asked: float, layers: np.ndarray,
    experts: np.ndarray,
) -> int:  # fmt: skip
    """Begin copies of (layer, expert) pairs that are absent, in order, `asked` for then; returns how many were begun.

    One for which every slot of its layer is pinned is left out and counted.
    """
    begun = 0
    for i in range(len(layers)):
        layer, expert = layers[i], experts[i]
        slot = reserve(slots, layer, expert)
        if slot == NONE:
            meter.counts[PREFETCH_REFUSED] += 1
            continue
        there = in_host_memory(streams, disk, asked, layer, expert)
        slots.ready_ms[layer, slot] = run(streams, H2D, copy_ms, there, PREFETCH, layer, expert)
        meter.fetched[layer, expert] = True
        begun += 1
    meter.counts[PREFETCHED] += begun
    meter.counts[COPIES] += begun
    return begun


@compiled
def serve(
    slots: Slots, streams: Streams, meter: Meter, costs: PassCosts, needs: Needs, ahead: Ahead, miss: int, told: bool, first: int,
    last: int, counted: bool,
) -> float:  # fmt: skip
    """Layers `first` .. `last` - 1 of a target pass; returns the event of its end. `told`: the host learns every routing."""
    row, began_ms = 0, streams.free_ms[COMPUTE]
    for layer in range(first, last):
        if miss in BY_KERNEL:
            row = _copy_own(slots, streams, meter, costs, ahead, row, layer, began_ms)
        now = run(streams, COMPUTE, costs.layer_ms, 0.0, ATTENTION, layer, NOBODY)
        if counted:
            _count(slots, meter, needs, layer, now)
        host_ms = run(streams, D2H, costs.routing_ms, now, ROUTING, layer, NOBODY) if told else now
        _experts(slots, streams, meter, costs, needs, miss, layer, now, host_ms)
        if miss not in BY_KERNEL and row < len(ahead.known):
            row = _copy_ahead(slots, streams, meter, costs, ahead, row, layer, host_ms)
    return streams.free_ms[COMPUTE]


@compiled
def _copy_own(
    slots: Slots, streams: Streams, meter: Meter, costs: PassCosts, ahead: Ahead, row: int, layer: int, began_ms: float
) -> int:
    """Begin what is wanted of `layer`, asked for when the pass began: nobody tells the host of misses that would go first."""
    last = row
    while last < len(ahead.layers) and ahead.layers[last] <= layer:
        last += 1
    absent = np.array(
        [i for i in range(row, last) if slots.slot_of[ahead.layers[i], ahead.experts[i]] == ABSENT], np.int64
    )
    prefetch(slots, streams, meter, costs.copy_ms, costs.disk, began_ms, ahead.layers[absent], ahead.experts[absent])
    return last


@compiled
def _copy_ahead(
    slots: Slots, streams: Streams, meter: Meter, costs: PassCosts, ahead: Ahead, row: int, layer: int, now: float
) -> int:
    """Begin what is wanted of later layers, behind the misses of `layer`; returns the first row that has to wait."""
    pace_ms = max(costs.copy_ms, costs.disk.pace_ms)
    while row < len(ahead.known) and ahead.known[row] <= layer:
        if ahead.layers[row] > layer:
            slot = slots.slot_of[ahead.layers[row], ahead.experts[row]]
            if slot == ABSENT:
                if streams.free_ms[H2D] - now > (AHEAD_COPIES - 1) * pace_ms:
                    break
                one = slice(row, row + 1)
                prefetch(slots, streams, meter, costs.copy_ms, costs.disk, now, ahead.layers[one], ahead.experts[one])
            slots.pinned[ahead.layers[row], ahead.experts[row]] = True
        row += 1
    return row


@compiled
def _experts(
    slots: Slots, streams: Streams, meter: Meter, costs: PassCosts, needs: Needs, miss: int, layer: int, now: float,
    host_ms: float,
) -> None:  # fmt: skip
    """One layer's experts: its routing is known on the GPU at `now`, to the host at `host_ms`."""
    release_all(slots, layer)  # what was planned for this layer has come, or is not needed
    rows = range(needs.first[layer], needs.first[layer + 1])
    in_use = np.empty(len(rows), np.int64)  # residents of this pass in the order they are done with
    done_ms = np.empty(len(rows))
    count, gone, ready_uses, absent, cpu_end = 0, 0, 0, 0, 0.0
    half, turns_ms = of_a_turn(slots, layer), 0.0  # and what the link waited for slots
    for row in rows:
        expert = needs.experts[row]
        slot = slots.slot_of[layer, expert]
        if slot == ABSENT:
            absent += 1
        else:
            use(slots, layer, expert)
            if slots.ready_ms[layer, slot] <= now:
                in_use[count] = expert
                count += 1
                ready_uses += needs.uses[row]
    if count:
        done_ms[:count] = run(streams, COMPUTE, experts_ms(costs, count, ready_uses), 0.0, RESIDENT, layer, NOBODY)
    if count + absent < len(rows):  # some are on their way: they arrive in the order they were asked for
        while True:
            row, arrival = -1, np.inf
            for i in rows:
                slot = slots.slot_of[layer, needs.experts[i]]
                if (
                    slot != ABSENT
                    and now < slots.ready_ms[layer, slot] < arrival
                    and not _among(in_use, count, needs.experts[i])
                ):
                    row, arrival = i, slots.ready_ms[layer, slot]
            if row < 0:
                break
            in_use[count] = needs.experts[row]
            done_ms[count] = _compute(streams, meter, costs, arrival, needs.uses[row], layer, in_use[count])
            count += 1
    if not absent:
        return
    for i in range(count):
        slots.pinned[layer, in_use[i]] = True
    turn_end = count  # the first turn is of those that are there
    for row in rows:
        expert, uses = needs.experts[row], needs.uses[row]
        if slots.slot_of[layer, expert] != ABSENT or _among(in_use, count, expert):
            continue
        kind = miss
        if miss == CPU_IF_SOONER or miss == CPU_IF_SHORTER:
            cpu_ms = max(costs.cpu_read_ms, uses * costs.cpu_flop_ms)
            there = max(streams.free_ms[DISK], host_ms) + costs.disk.read_ms if expert >= costs.disk.first else host_ms
            queued_ms = streams.free_ms[H2D] - turns_ms  # that comes later than this is decided
            cpu_free_ms, link_free_ms = max(streams.free_ms[CPU], there), max(queued_ms, there)
            sooner = ends_sooner_by_cpu(cpu_free_ms, cpu_ms, link_free_ms, costs.copy_ms)
            better = sooner if miss == CPU_IF_SOONER else cpu_ms < costs.copy_ms
            kind = CPU_IF_SOONER if better else LOAD
        by_host_ms = host_ms if kind not in BY_KERNEL or expert >= costs.disk.first else now  # a kernel reads no disk
        if kind == LOAD or kind == ADMIT:
            slot, after = reserve(slots, layer, expert), by_host_ms
            while slot == NONE:  # every slot is in use here: the first expert that is done gives up its own
                release(slots, layer, in_use[gone])
                if gone == turn_end:
                    turn_end = min(gone + half, count)
                in_turns = kind == LOAD and costs.turn_ms > 0
                after = max(after, done_ms[turn_end - 1] + costs.turn_ms if in_turns else done_ms[gone])
                gone += 1
                slot = reserve(slots, layer, expert)
            use(slots, layer, expert)
            there = in_host_memory(streams, costs.disk, by_host_ms, layer, expert)
            if kind == LOAD and costs.turn_ms > 0:
                turns_ms += max(0.0, after - max(there, streams.free_ms[H2D]))
            there = max(there, after)
            if kind == LOAD:
                meter.counts[COPIES] += 1
                arrival = run(streams, H2D, costs.copy_ms, there, MISS, layer, expert)
            else:
                meter.counts[READ_THROUGH_MISSES] += 1
                arrival = run(streams, H2D, costs.read_through_ms, there, ZERO_COPY, layer, expert)
            slots.ready_ms[layer, slot] = arrival
            slots.pinned[layer, expert] = True
            in_use[count] = expert
            done_ms[count] = _compute(streams, meter, costs, arrival, uses, layer, expert)
            count += 1
        elif kind == READ_THROUGH:
            meter.counts[READ_THROUGH_MISSES] += 1
            there = in_host_memory(streams, costs.disk, by_host_ms, layer, expert)
            arrival = run(streams, H2D, costs.read_through_ms, there, ZERO_COPY, layer, expert)
            _compute(streams, meter, costs, arrival, uses, layer, expert)
        elif kind == CPU_IF_SOONER:
            meter.counts[CPU_MISSES] += 1
            there = in_host_memory(streams, costs.disk, host_ms, layer, expert)
            cpu_end = run(streams, CPU, cpu_ms, there, CPU_EXPERT, layer, expert)
        else:
            meter.counts[DRAFT_WEIGHT_MISSES] += 1
            meter.weights[WEIGHT_IN_DRAFT_PRECISION] += needs.weights[row]
            int4_ms = max(costs.read_ms / 4, uses * costs.flop_ms, costs.launch_ms)
            run(streams, COMPUTE, int4_ms, 0.0, EXPERT, layer, expert)
    release_all(slots, layer)
    taken_ms = cpu_end + costs.turn_ms if cpu_end > 0 else 0.0  # the layer's sum needs the CPU's part
    meter.stall_ms[0] += max(0.0, taken_ms - streams.free_ms[COMPUTE])
    streams.free_ms[COMPUTE] = max(streams.free_ms[COMPUTE], taken_ms)


@compiled
def _compute(
    streams: Streams, meter: Meter, costs: PassCosts, arrival_ms: float, uses: int, layer: int, expert: int
) -> float:
    """Compute one expert once it is there; the wait is a stall."""
    meter.stall_ms[0] += max(0.0, arrival_ms - streams.free_ms[COMPUTE])
    return run(streams, COMPUTE, experts_ms(costs, 1, uses), arrival_ms, EXPERT, layer, expert)


@compiled
def _among(experts: np.ndarray, count: int, expert: int) -> bool:
    for i in range(count):
        if experts[i] == expert:
            return True
    return False


@compiled
def _count(slots: Slots, meter: Meter, needs: Needs, layer: int, now: float) -> None:
    """Count hits by every definition, before anything of this layer moves."""
    counts = meter.counts
    for row in range(needs.first[layer], needs.first[layer + 1]):
        expert, uses = needs.experts[row], needs.uses[row]
        counts[NEEDED] += 1
        counts[USES] += uses
        meter.weights[WEIGHT] += needs.weights[row]
        slot = slots.slot_of[layer, expert]
        if slot == ABSENT:
            continue
        if meter.fetched[layer, expert]:
            counts[PREFETCHED_USED] += 1
        if slots.ready_ms[layer, slot] <= now:
            counts[NEEDED_READY] += 1
            counts[USES_READY] += uses
        else:
            counts[NEEDED_IN_FLIGHT] += 1
            counts[USES_IN_FLIGHT] += uses
    tokens, top_k = needs.token_experts.shape[1:]
    for token in range(tokens):
        all_ready = True
        for place in range(top_k):
            slot = slots.slot_of[layer, needs.token_experts[layer, token, place]]
            all_ready = all_ready and slot != ABSENT and slots.ready_ms[layer, slot] <= now
        counts[TOKEN_LAYERS] += 1
        counts[TOKEN_LAYERS_READY] += all_ready
