"""One engine, a few requests written together, a bounded number waiting.

The engine has a thread of its own, the only one that touches it. It writes in batches (`engine.batch`): whoever waits joins as soon
as a lane is free, if the lanes are long enough for it; else when all are free, and lanes are made that are.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from functools import partial

import torch
from torch import Tensor

from specter_lab.engine.batch import Request
from specter_lab.engine.session import Session
from specter_lab.serve.model import Served
from specter_lab.serve.write import Ask, Piece, Writer, sampling, temperature_of


class Full(Exception):
    """As many requests wait as may."""


class Closing(Exception):
    """The server stops."""


class Job:
    """A request that waits or is being written. Whoever asked reads `pieces`, and cancels it when nobody wants them."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
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
    """Requests in the order they came.

    Args:
        lanes: written together, at most.

    Raises:
        UserError: more lanes than the engine's mode serves.
    """

    def __init__(self, served: Served, max_waiting: int, lanes: int = 1) -> None:
        self._served, self.lanes, self._max_inside = served, lanes, max_waiting + lanes
        self._depth = served.engine.deepest(served.depth)
        served.engine.check_lanes(lanes, self._depth)
        self._inside: set[Job] = set()
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._engine = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._engine.start()

    @property
    def inside(self) -> int:
        """Requests that wait or are being written."""
        return len(self._inside)

    def enter(self, ask: Ask) -> Job:
        """Line up. Raises Full or Closing."""
        if self._closing.is_set():
            raise Closing
        if self.inside >= self._max_inside:
            raise Full
        job = Job(ask)
        self._inside.add(job)
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()
        return job

    def close(self) -> None:
        """No more requests; what is being written ends after its round. May be called from a signal handler."""
        self._closing.set()

    def join(self) -> None:
        """Wait for the engine's thread."""
        self.close()
        with self._changed:
            self._changed.notify()
        self._engine.join()

    def _serve(self) -> None:
        while not self._closing.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
            if not self._closing.is_set():
                self._write_batch()
        while self._waiting:
            self._end(self._waiting.popleft(), Closing())

    def _write_batch(self) -> None:
        """Write who waits until all lanes are free and nobody fits them who waits."""
        writing: dict[Request, tuple[Job, Writer]] = {}
        try:
            session = self._session()
            for request, tokens, is_last in self._served.engine.batch(session, partial(self._take, session, writing)):
                job, writer = writing[request]
                if self._tell(job, writer, tokens, is_last):
                    del writing[request]
        except BaseException as error:  # of the engine: nobody's request goes on
            if not writing and self._waiting:  # it could not even begin
                self._end(self._waiting.popleft(), error)
            for job, _ in writing.values():
                self._end(job, error)

    def _take(self, session: Session, writing: dict[Request, tuple[Job, Writer]]) -> Request | None:
        """The next who fits; whoever was cancelled, or cannot be written, is told so."""
        for gone in [request for request, (job, _) in writing.items() if job not in self._inside]:
            del writing[gone]
        while self._waiting and not self._closing.is_set():
            job = self._waiting[0]
            if not job.cancelled.is_set() and not self._fits(session, job.ask):
                return None
            self._waiting.popleft()
            try:
                if not job.cancelled.is_set():
                    request = self._request(job)
                    writing[request] = job, Writer(self._served, job.ask)
                    return request
                self._end(job)
            except Exception as error:
                self._end(job, error)
        return None

    def _tell(self, job: Job, writer: Writer, tokens: list[int], is_last: bool) -> bool:
        """Whether that was its last."""
        try:
            piece = writer.add(tokens)
            job.put(piece)
            if is_last and piece.finish is None:
                job.put(piece := writer.end())
        except Exception as error:
            self._end(job, error)
            return True
        if piece.finish:
            self._end(job)
        return piece.finish is not None

    def _session(self) -> Session:
        """For whoever is first."""
        ask = self._waiting[0].ask
        warmth = temperature_of(ask) if self.lanes == 1 else None
        return self._served.engine.session_for(len(ask.ids) + ask.max_tokens, self._depth, warmth, self.lanes)

    def _request(self, job: Job) -> Request:
        engine, ask = self._served.engine, job.ask
        ids = torch.tensor(ask.ids, device=engine.device)
        return engine.request(ids, ask.max_tokens, ends=self._served.ends, wanted=lambda: self._wanted(job), **sampling(self._served, ask))  # fmt: skip

    def _wanted(self, job: Job) -> bool:
        if job in self._inside and (self._closing.is_set() or job.cancelled.is_set()):
            self._end(job, Closing() if self._closing.is_set() else None)
        return job in self._inside

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        if job in self._inside:
            self._inside.discard(job)
            if error is not None:
                job.put(error)
            job.put(None)

    def _fits(self, session: Session, ask: Ask) -> bool:
        """Whether a lane is long enough, and of its temperature where the session has but one."""
        own = isinstance(session.temperature, Tensor) or session.temperature == temperature_of(ask)
        return own and session.kv.max_tokens > len(ask.ids) + ask.max_tokens + self._depth
