"""When work on a stream began and ended: device events on a GPU, read once they have happened, or the host's clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from specter_lab.plan.streams import NOBODY, Span


@dataclass
class Stopwatch:
    """Stretches of work, as `plan.streams.Span` in ms since `start`."""

    on_gpu: bool
    _origin: object = None
    _pending: list = field(default_factory=list)
    _spare: list = field(default_factory=list)  # events that may be recorded again

    def start(self) -> None:
        """Forget everything; times count from here."""
        self._pending.clear()
        self._origin = self._mark()

    def wait(self) -> None:
        """Until the current stream has done what it was given."""
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()

    @contextmanager
    def stretch(
        self, stream: str, work: str, layer: int = NOBODY, on: torch.cuda.Stream | None = None
    ) -> Iterator[None]:
        """Time what is given to a CUDA stream inside, to the current one unless another is named; `stream` and `work` are what it
        is called."""
        began = self._mark(on)
        yield
        self._pending.append((stream, work, layer, began, self._mark(on)))

    def ended(self) -> list[Span]:
        """Stretches that have ended since the last call, in the order they were given."""
        spans, still_running = [], []
        for stretch in self._pending:
            stream, work, layer, began, end = stretch
            if self.on_gpu and not end.query():
                still_running.append(stretch)
                continue
            spans.append(Span(stream, self._since_start(began), self._since_start(end), work, layer, NOBODY))
            self._spare += [began, end]
        self._pending = still_running
        return spans

    def _mark(self, on: torch.cuda.Stream | None = None) -> object:
        if not self.on_gpu:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(on)
        return event

    def _since_start(self, mark: object) -> float:
        return self._origin.elapsed_time(mark) if self.on_gpu else (mark - self._origin) * 1e3
