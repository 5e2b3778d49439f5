"""One engine, requests one after the other, a bounded number waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

from specter_lab.serve.write import Piece

Work = Callable[[], Iterator[Piece]]  # called and read by the engine's thread alone


class Full(Exception):
    """As many requests wait as may."""


class Closing(Exception):
    """The server stops."""


class Job:
    """A request that waits or is being written. Whoever asked reads `pieces`, and cancels it when nobody wants them."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        """Not begun: it never will be; being written: it ends after the round."""
        self.cancelled.set()

    async def pieces(self) -> AsyncIterator[Piece]:
        """The text, piece by piece.

        Raises:
            Closing: the server stops.
            UserError: what the engine refuses.
        """
        while (arrived := await self._arrived.get()) is not None:
            if isinstance(arrived, BaseException):
                raise arrived
            yield arrived

    def put(self, arrived: Piece | BaseException | None) -> None:
        """From the engine's thread; None ends it."""
        self._loop.call_soon_threadsafe(self._arrived.put_nowait, arrived)


class Line:
    """Requests in the order they came; the engine has a thread of its own, the only one that touches it."""

    def __init__(self, max_waiting: int) -> None:
        self._max_inside = max_waiting + 1
        self._inside: set[Future] = set()
        self._engine = ThreadPoolExecutor(1, "engine")
        self._closing = threading.Event()

    @property
    def inside(self) -> int:
        """Requests that wait or are being written."""
        return len(self._inside)

    def enter(self, work: Work) -> Job:
        """Line up. Raises Full or Closing."""
        if self._closing.is_set():
            raise Closing
        if self.inside >= self._max_inside:
            raise Full
        job = Job()
        future = self._engine.submit(self._write, job, work)
        self._inside.add(future)
        future.add_done_callback(self._inside.discard)
        return job

    def close(self) -> None:
        """No more requests; what is being written ends after its round. May be called from a signal handler."""
        self._closing.set()

    def join(self) -> None:
        """Wait for the engine's thread."""
        self.close()
        self._engine.shutdown()

    def _write(self, job: Job, work: Work) -> None:
        try:
            if not self._must_stop(job):
                with closing(work()) as pieces:
                    for piece in pieces:
                        job.put(piece)
                        if piece.finish is None and self._must_stop(job):
                            break
        except BaseException as error:
            job.put(error)
        finally:
            job.put(None)

    def _must_stop(self, job: Job) -> bool:
        if self._closing.is_set():
            job.put(Closing())
        return self._closing.is_set() or job.cancelled.is_set()
