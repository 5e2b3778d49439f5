"""Streams in virtual time: what CUDA streams and events are on a machine that is only a table of numbers.

Work on one stream runs in the order it was given, and starts when the work before it has ended and the event it waits
for has happened. An event is the virtual time at which something ended, in ms. Nothing is random and nothing polls,
so the same calls give the same times.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specter_lab.compiled import compiled

STREAM_NAMES = ("compute", "H2D", "D2H", "CPU", "disk")
COMPUTE, H2D, D2H, CPU, DISK = range(len(STREAM_NAMES))
WORK_NAMES = ("draft step", "prefetch", "attention", "resident experts", "expert", "miss", "zero-copy", "CPU expert",
              "dense layers", "accept", "routing", "disk read")  # fmt: skip
DRAFT, PREFETCH, ATTENTION, RESIDENT, EXPERT, MISS, ZERO_COPY, CPU_EXPERT, DENSE, ACCEPT, ROUTING, DISK_READ = range(
    len(WORK_NAMES)
)
NOBODY = -1  # layer or expert of work that belongs to none


class Streams(NamedTuple):
    """The clocks of all streams, and a log of their work when there is room for one."""

    free_ms: np.ndarray  # [5] when the work given so far will have ended
    busy_ms: np.ndarray  # [5] work done
    log: np.ndarray  # [room, 6] float64: stream, start, end, work, layer, expert
    logged: np.ndarray  # [1] rows of the log in use


@dataclass(frozen=True)
class Span:
    """One piece of work on one stream."""

    stream: str
    start_ms: float
    end_ms: float
    work: str
    layer: int  # MoE layer, or NOBODY
    expert: int


def new_streams(log_rows: int = 0) -> Streams:
    """Idle streams at time 0, with room to log so many pieces of work."""
    return Streams(
        np.zeros(len(STREAM_NAMES)), np.zeros(len(STREAM_NAMES)), np.zeros((log_rows, 6)), np.zeros(1, np.int64)
    )


@compiled
def run(streams: Streams, stream: int, ms: float, after_ms: float, work: int, layer: int, expert: int) -> float:
    """Do `ms` of work on `stream`, not before the event `after_ms`; returns the event of its end."""
    start = max(streams.free_ms[stream], after_ms)
    end = start + ms
    streams.free_ms[stream] = end
    streams.busy_ms[stream] += ms
    row = streams.logged[0]
    if row < len(streams.log):
        streams.log[row, 0], streams.log[row, 1], streams.log[row, 2] = stream, start, end
        streams.log[row, 3], streams.log[row, 4], streams.log[row, 5] = work, layer, expert
        streams.logged[0] = row + 1
    return end


def spans(streams: Streams) -> list[Span]:
    """The log, in the order the work was given."""
    return [
        Span(STREAM_NAMES[int(stream)], start, end, WORK_NAMES[int(work)], int(layer), int(expert))
        for stream, start, end, work, layer, expert in streams.log[: streams.logged[0]].tolist()
    ]


def chrome_trace(work: Iterable[Span]) -> dict:
    """Spans in Chrome's trace event format (one process, one thread per stream; times in us): opens in Perfetto."""
    threads = [
        {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": stream}}
        for number, stream in enumerate(STREAM_NAMES)
    ]
    events = [
        {"ph": "X", "pid": 0, "tid": STREAM_NAMES.index(span.stream), "name": span.work, "ts": span.start_ms * 1e3,
         "dur": (span.end_ms - span.start_ms) * 1e3, "args": {"layer": span.layer, "expert": span.expert}}
        for span in work
    ]  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": threads + events}


def write_chrome_trace(work: Iterable[Span], path: Path) -> None:
    """Store `chrome_trace(work)` as JSON."""
    path.write_text(json.dumps(chrome_trace(work)), encoding="utf-8")
