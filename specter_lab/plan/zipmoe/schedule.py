"""In which order the experts of a layer are fetched (ZipMoE's cache-affinity scheduling), and how good an order is.

The I/O thread and the workers go through the experts in one order. A *block* is a Type-I expert, whose SM-chunk must be
read, and Type-II experts until the workers have as much to do as the read takes. Both types are sorted by execution time,
longest first, so that what remains at the end is short. The paper claims a makespan of at most (3 - 1/L) times the optimum.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

from specter_lab.plan.zipmoe.work import Work

Order = Callable[[Sequence[Work], int], list[Work]]


@dataclass(frozen=True)
class Timeline:
    """When an order is done; seconds from the layer's call on."""

    makespan_s: float
    io_s: float  # the I/O thread is done
    workers_s: float  # the workers are
    ready_s: tuple[float, ...]  # per expert in the order given
    waiting_s: float  # the executor had nothing to do


def timeline(order: Sequence[Work], workers: int, io_order: Sequence[Work] | None = None) -> Timeline:
    """What happens when I/O and workers take experts in `order`, the executor whatever is ready first.

    Args:
        order: of the workers' shards and, unless given apart, of the reads.
        workers: L, at least one.
        io_order: another order of the reads.
    """
    read_at: dict[int, float] = {}
    io_s = 0.0
    for work in order if io_order is None else io_order:
        if work.type_one:
            io_s += work.io_s
            read_at[work.expert] = io_s
    free = [0.0] * workers
    ready = []
    for work in order:
        done = read_at.get(work.expert, 0.0)
        for shard_s in work.shard_s:
            end = heapq.heappop(free) + shard_s
            heapq.heappush(free, end)
            done = max(done, end)
        ready.append(done)
    now = waiting = 0.0
    for at, work in sorted(zip(ready, order), key=lambda pair: pair[0]):
        waiting += max(0.0, at - now)
        now = max(now, at) + work.execute_s
    return Timeline(now, io_s, max(free) if order else 0.0, tuple(ready), waiting)


def blocks(works: Sequence[Work], workers: int) -> list[list[Work]]:
    """ZipMoE's blocks, in the order they are processed; Type-II experts left over make the last one."""
    ones = sorted((w for w in works if w.type_one), key=lambda w: (-w.execute_s, w.expert))
    twos = sorted((w for w in works if not w.type_one), key=lambda w: (-w.execute_s, w.expert))
    found = []
    for one in ones:
        block = [one]
        while twos and sum(w.cpu_s for w in block) / workers < one.io_s:
            block.append(twos.pop(0))
        found.append(block)
    return found + ([twos] if twos else [])


def by_blocks(works: Sequence[Work], workers: int) -> list[Work]:
    """ZipMoE's order."""
    return [work for block in blocks(works, workers) for work in block]


def as_given(works: Sequence[Work], workers: int) -> list[Work]:
    """First come, first served: the router's order."""
    return list(works)


def type_two_first(works: Sequence[Work], workers: int) -> list[Work]:
    """What is in memory first."""
    return sorted(works, key=lambda w: w.type_one)


def shuffled(works: Sequence[Work], workers: int) -> list[Work]:
    """A random order that depends on the experts alone."""
    mixed = sorted(works, key=lambda w: w.expert)
    random.Random(repr(mixed)).shuffle(mixed)
    return mixed


ORDERS: dict[str, Order] = {"blocks": by_blocks, "fifo": as_given, "type-II-first": type_two_first, "random": shuffled}


def lower_bound(works: Sequence[Work], workers: int) -> float:
    """Seconds that no schedule can beat: every machine's whole work, and every expert's own path."""
    if not works:
        return 0.0
    ones = [w for w in works if w.type_one]
    own = [max(w.io_s, max(w.shard_s, default=0.0), w.cpu_s / workers) for w in works]  # before it can execute
    least = min(w.execute_s for w in works)
    bounds = [
        min(own) + sum(w.execute_s for w in works),
        max(before + w.execute_s for before, w in zip(own, works)),
        sum(w.cpu_s for w in works) / workers + (least if any(w.shard_s for w in works) else 0.0),
    ]
    if ones:
        bounds.append(sum(w.io_s for w in ones) + min(w.execute_s for w in ones))
    return max(bounds)


def optimum(works: Sequence[Work], workers: int) -> float:
    """The best makespan over all pairs of an order of reads and an order of experts at the workers, by trying all.

    Shards of one expert stay together, and nobody waits on purpose. Grows as (n!)^2: for at most five experts.

    Raises:
        ValueError: more than five experts.
    """
    if len(works) > 5:
        raise ValueError(f"{len(works)} experts have too many orders to try: at most five")
    ones, busy = [w for w in works if w.type_one], [w for w in works if w.shard_s]
    idle = [w for w in works if not w.shard_s]
    return min(
        timeline([*at_workers, *idle], workers, reads).makespan_s
        for reads in permutations(ones)
        for at_workers in permutations(busy)
    )
