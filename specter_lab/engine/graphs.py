"""A pass as CUDA graphs: one, or as many as it takes to let the host do something in between.

    graph | host | experts' graph, as often as the host likes | graph | host | ...

A function that calls `host_work` on its way is captured piece by piece; replaying does the same in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Launch = Callable[[], None]
HostWork = Callable[[Launch], None]

_recording: _Recording | None = None


def host_work(work: HostWork, kernels: Launch) -> None:
    """Call `work(run)` here, now and in every replay of a captured pass; each `run()` launches `kernels` once."""
    if _recording is None:
        work(kernels)
    else:
        _recording.cut(work, kernels)


def captured(function: Callable[[], object], restore: Sequence[Tensor]) -> Callable[[], object]:
    """`function` as something that replays it on the same buffers.

    Args:
        function: launches kernels; has no side effect on the host but through `host_work`.
        restore: buffers that it changes and that a warm-up must leave as they were.
    """
    global _recording
    kept = [(buffer, buffer.clone()) for buffer in restore]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # compiles kernels
        torch.cuda.synchronize()
        _recording = _Recording()
        try:
            out = function()
        finally:
            steps, _recording = _recording.end(), None
    torch.cuda.current_stream().wait_stream(stream)
    for buffer, value in kept:
        buffer.copy_(value)

    def replay() -> object:
        for step in steps:
            step()
        return out

    return replay


class _Recording:
    """Graphs and the host's work between them, in order; the graphs share one memory pool."""

    def __init__(self) -> None:
        self._steps: list[Launch] = []
        self._pool = torch.cuda.graph_pool_handle()
        self._begin()

    def cut(self, work: HostWork, kernels: Launch) -> None:
        self._steps.append(self._ended())
        self._begin()
        kernels()
        run = self._ended()
        self._steps.append(lambda: work(run))
        self._begin()

    def end(self) -> list[Launch]:
        self._steps.append(self._ended())
        return self._steps

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool)

    def _ended(self) -> Launch:
        self._graph.capture_end()
        return self._graph.replay
