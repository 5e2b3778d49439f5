"""Putting experts together: one I/O thread reads SM-chunks, L workers read E-chunks, decompress and hand them on.

A `Fetch` is one expert on its way. It is *ready* when all its shards are recovered. Shards that are there before the SM-chunk
wait for it and then go to the workers once more, before those of experts begun later: the I/O thread does nothing but read.
Errors travel with the fetch.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from queue import PriorityQueue, SimpleQueue

import numpy as np

from specter_lab.compress.bitfield import exponents_alone, put_together, shard_bounds
from specter_lab.compress.codecs import Codec
from specter_lab.engine.store.layout import Key, Record, padded
from specter_lab.engine.store.reader import Reader
from specter_lab.engine.zipmoe.memory import Buffer, Held

JOIN_S = 10.0


@dataclass
class Fetch:
    """One expert being put together; `held` are its buffers, of the staging or of a pool."""

    record: Record
    held: Held
    read_sign_mantissa: bool
    read_exponents: bool
    borrowed: frozenset[str] = frozenset()  # parts that a pool lends
    raw: bool = False  # the raw copy instead of bit fields: no decompression
    number: int = 0  # fetches begun before it
    waiting: set[int] = field(default_factory=set)  # shards that were there before the SM-chunk
    read: set[int] = field(default_factory=set)  # E-chunks read for this fetch
    # Decompressed shards; None of a codec that recovers at once.
    exponents: dict[int, np.ndarray | None] = field(default_factory=dict)
    left: int = 0  # shards that are not recovered
    sign_mantissa_here: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    error: BaseException | None = None

    @property
    def key(self) -> Key:
        return self.record.key


@dataclass
class ReadAhead:
    """Both chunks of an expert that may be needed, read and not decompressed."""

    record: Record
    held: Held
    done: threading.Event = field(default_factory=threading.Event)
    started: bool = False
    dropped: bool = False
    error: BaseException | None = None


@dataclass
class Counters:
    """Seconds that threads were busy, summed over threads."""

    decompress_s: float = 0.0  # recovery included where a codec does both at once
    recover_s: float = 0.0


class Fetcher:
    """The threads; closing it ends them."""

    def __init__(self, reader: Reader, codec: Codec, workers: int, give: Callable[[Held], None]) -> None:
        """`give` frees the buffers of a read-ahead that nobody wanted; it is called under the fetcher's lock."""
        self.reader, self.codec, self.counters = reader, codec, Counters()
        self.ready: SimpleQueue[Fetch] = SimpleQueue()
        self._give = give
        self._begun = count()
        # In the order of fetches; no fetch: the end.
        self._shards: PriorityQueue[tuple[float, int, Fetch | None]] = PriorityQueue()
        self._reads: deque[Fetch | ReadAhead] = deque()  # demand in front
        self._some = threading.Condition()
        self._closing = False
        names = [("io", self._read_loop), *((f"worker-{i}", self._work_loop) for i in range(workers))]
        self._threads = [threading.Thread(target=loop, name=f"zipmoe-{name}", daemon=True) for name, loop in names]
        for thread in self._threads:
            thread.start()

    def start(self, fetch: Fetch) -> None:
        """Begin to put an expert together; it comes out of `ready`."""
        fetch.number, fetch.left = next(self._begun), len(fetch.record.shards)
        fetch.sign_mantissa_here = not fetch.read_sign_mantissa
        if fetch.read_sign_mantissa or fetch.raw:
            with self._some:
                at = next((i for i, r in enumerate(self._reads) if isinstance(r, ReadAhead)), len(self._reads))
                self._reads.insert(at, fetch)
                self._some.notify()
        if not fetch.raw:
            for k in range(len(fetch.record.shards)):
                self._shards.put((fetch.number, k, fetch))

    def read_ahead(self, ahead: ReadAhead) -> None:
        """Read an expert's chunks when there is nothing more urgent."""
        with self._some:
            self._reads.append(ahead)
            self._some.notify()

    def drop(self, ahead: ReadAhead) -> None:
        """Nobody wants it: its buffers are free at once, or when the read that has begun ends."""
        with self._some:
            ahead.dropped = True
            if ahead.done.is_set() or not ahead.started:
                if not ahead.started:
                    self._reads.remove(ahead)
                self._give(ahead.held)

    def idle(self) -> bool:
        """Whether the I/O thread has nothing waiting."""
        return not self._reads

    def close(self) -> None:
        """End all threads. Raises RuntimeError when one does not end in time."""
        with self._some:
            self._closing = True
            self._reads.clear()
            self._some.notify_all()
        for _ in self._threads[1:]:
            self._shards.put((math.inf, 0, None))
        for thread in self._threads:
            thread.join(JOIN_S)
        if alive := [thread.name for thread in self._threads if thread.is_alive()]:
            raise RuntimeError(f"{', '.join(alive)} did not end within {JOIN_S:.0f} s\n{self.stacks()}")

    def stacks(self) -> str:
        """Where every thread stands."""
        frames = sys._current_frames()
        return "\n".join(
            f"{thread.name}: {'alive' if thread.is_alive() else 'ended'}\n"
            + "".join(traceback.format_stack(frames[thread.ident])[-3:] if thread.ident in frames else [])
            for thread in self._threads
        )

    def _read_loop(self) -> None:
        while True:
            with self._some:
                while not self._reads and not self._closing:
                    self._some.wait()
                if self._closing:
                    return
                task = self._reads.popleft()
                if isinstance(task, ReadAhead):
                    task.started = True
            if isinstance(task, ReadAhead):
                self._read_both(task)
            else:
                self._guarded(task, self._read_raw if task.raw else self._read_sign_mantissa, task)

    def _read_both(self, ahead: ReadAhead) -> None:
        try:
            read_exponents(self.reader, ahead.record, ahead.held.exponents)
            self._read(ahead.record, ahead.held)
        except BaseException as error:
            ahead.error = error
        with self._some:
            ahead.done.set()
            if ahead.dropped:
                self._give(ahead.held)

    def _read_raw(self, fetch: Fetch) -> None:
        read_raw(self.reader, fetch.record, fetch.held.full)
        self.ready.put(fetch)

    def _read_sign_mantissa(self, fetch: Fetch) -> None:
        self._read(fetch.record, fetch.held)
        with fetch.lock:
            fetch.sign_mantissa_here = True
            early = sorted(fetch.waiting)
            fetch.waiting.clear()
        for k in early:
            self._shards.put((fetch.number, k, fetch))

    def _read(self, record: Record, held: Held) -> None:
        chunk = record.sign_mantissa
        self.reader.read_into(held.sign_mantissa[: chunk.padded_bytes], chunk.offset)

    def _work_loop(self) -> None:
        while (task := self._shards.get())[-1] is not None:
            _, k, fetch = task
            if fetch.error is None:
                self._guarded(fetch, self._shard, fetch, k)

    def _shard(self, fetch: Fetch, k: int) -> None:
        chunk = fetch.record.shards[k]
        first, last = shard_bounds(fetch.record.sign_mantissa.num_bytes, len(fetch.record.shards))[k]
        at = chunk.offset - fetch.record.shards[0].offset
        shard = fetch.held.exponents[at : at + chunk.num_bytes]
        if fetch.read_exponents and k not in fetch.read:
            self.reader.read_into(fetch.held.exponents[at : at + chunk.padded_bytes], chunk.offset)
            fetch.read.add(k)
        if k not in fetch.exponents:
            fetch.exponents[k] = decompress(shard, last - first, self.codec, self.counters)
        with fetch.lock:
            if not fetch.sign_mantissa_here:
                fetch.waiting.add(k)
                return
        fields, out = fetch.held.sign_mantissa[first:last], fetch.held.full.view(np.uint16)[first:last]
        finish(shard, fetch.exponents.pop(k), fields, self.codec, out, self.counters)
        with fetch.lock:
            fetch.left -= 1
            done = fetch.left == 0
        if done:
            self.ready.put(fetch)

    def _guarded(self, fetch: Fetch, work: Callable, *arguments) -> None:
        try:
            work(*arguments)
        except BaseException as error:  # it is raised where the fetch is waited for
            if fetch.error is None:
                fetch.error = error
                self.ready.put(fetch)


def decompress(shard: Buffer, num_weights: int, codec: Codec, spent: Counters) -> np.ndarray | None:
    """`exponents_alone`, timed."""
    begun = time.perf_counter()
    found = exponents_alone(shard, num_weights, codec)
    passed_s = time.perf_counter() - begun
    spent.decompress_s += passed_s
    return found


def finish(
    shard: Buffer, exponents: np.ndarray | None, sign_mantissa: Buffer, codec: Codec, out: np.ndarray, spent: Counters
) -> None:
    """`put_together`, timed: as decompression where the codec does both at once."""
    begun = time.perf_counter()
    put_together(shard, exponents, sign_mantissa, codec, out)
    passed_s = time.perf_counter() - begun
    if exponents is None:
        spent.decompress_s += passed_s
    else:
        spent.recover_s += passed_s


def read_exponents(reader: Reader, record: Record, buffer: np.ndarray) -> None:
    """All E-chunks of an expert at once: they lie one after the other."""
    reader.read_into(buffer[: record.exponent_bytes], record.shards[0].offset)


def read_raw(reader: Reader, record: Record, buffer: np.ndarray) -> None:
    """The raw copy of an expert, whole pages."""
    reader.read_into(buffer[: padded(record.raw.num_bytes)], record.raw.offset)
