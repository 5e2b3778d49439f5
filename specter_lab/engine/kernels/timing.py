"""Device time of kernels: replays of a CUDA graph that holds many calls, so that launches on the host don't count."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

_COPY_BYTES = 1 << 31
_LINK_BYTES = 1 << 28


def replay_us(calls: Sequence[Callable[[], object]], repeats: int = 30) -> float:
    """Median microseconds of one of `calls`, run one after the other in one graph.

    Together the calls must touch several times the L2, or the cache is what is measured.
    """
    return statistics.median(replay_times_us(calls, repeats))


def replay_times_us(calls: Sequence[Callable[[], object]], repeats: int = 30) -> list[float]:
    """The same of every replay: microseconds of a call, the mean over the graph."""
    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return [time_us / len(calls) for time_us in stream_times_us(graph.replay, repeats)]


def stream_us(call: Callable[[], object], repeats: int = 30) -> float:
    """Median microseconds between the events before and after `call` on the current stream."""
    return statistics.median(stream_times_us(call, repeats))


def stream_times_us(call: Callable[[], object], repeats: int) -> list[float]:
    """Microseconds of each repeat, after three to warm up."""
    for _ in range(3):
        call()
    times_us = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times_us.append(1e3 * begin.elapsed_time(end))
    return times_us


def copy_gb_s() -> float:
    """Device memory bandwidth: a device-to-device copy, bytes read plus bytes written.

    Not in a graph: there the copy becomes a node of its own kind, which moves a third less.
    """
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / stream_us(lambda: target.copy_(source)) / 1e3


def link_gb_s() -> float:
    """PCIe bandwidth, host to device: a copy from pinned memory by the copy engine."""
    source = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True).fill_(7)
    target = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cuda")
    return _LINK_BYTES / replay_us([lambda: target.copy_(source, non_blocking=True)], repeats=10) / 1e3
