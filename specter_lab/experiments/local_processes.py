"""The runner that needs nothing: one process per core of this machine, for one experiment or for several side by side."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue

import psutil

from specter_lab.experiments.context import Context
from specter_lab.experiments.job import Job, Outcome, Rows, WorkerLost, timed

WORKER_BYTES = 2 * 2**30  # one process with torch and a zoo model
GPU_WORKER_BYTES = 12 * 2**30  # on a GPU: its context, kernels, and what it keeps of batches
COPIES = 8  # of a BF16 checkpoint that a worker may hold: the target in float32, its draft, and what quantising needs
QUIET = {"TQDM_DISABLE": "1"}  # the bar of the whole run is the one to see
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


def worker_count(context: Context, jobs: Sequence[Job]) -> int:
    """Processes to use: one per core, as far as host memory and, beyond the cpu tier, GPU memory go."""
    models = {job.arguments["model"] for job in jobs if "model" in job.arguments}
    return min(process_count(context.tier, models), len(jobs))


def process_count(tier: str, models: Collection[str], own_bytes: int = WORKER_BYTES) -> int:
    """Processes that take `own_bytes` and hold one of these models each: at least one."""
    import torch  # here, not above: every new process imports this file, and not every row needs torch

    from specter_lab.models.load import resolve, weight_bytes

    weights = COPIES * max((weight_bytes(resolve(model)) for model in models), default=0)
    held = psutil.virtual_memory().available // (own_bytes + weights)
    if tier != "cpu" and torch.cuda.is_available():
        held = min(held, torch.cuda.mem_get_info()[0] // (GPU_WORKER_BYTES + weights))
    return max(1, min(len(os.sched_getaffinity(0)), held))


def run(context: Context, jobs: Sequence[Job]) -> Generator[tuple[int, Outcome], None, None]:
    """Outcomes as they come. However it ends, Ctrl-C and closing included, no process is left behind."""
    if context.shared is not None:
        futures = _submitted(context.shared, jobs)
        try:
            yield from _as_they_come(futures)
        finally:
            for future in futures:  # where one failed nobody wants the others, but the processes go on
                future.cancel()
        return
    workers = 1 if any(job.alone for job in jobs) else worker_count(context, jobs)
    with _started_with(QUIET | (ONE_THREAD if workers > 1 else {})), _processes(workers) as pool:
        with _ctrl_c_ignored():  # workers start here, and inherit it
            futures = _submitted(pool, jobs)
        yield from _as_they_come(futures)


def _submitted(processes: ProcessPoolExecutor | SharedProcesses, jobs: Sequence[Job]) -> list[Future]:
    return [processes.submit(timed, job.function, dict(job.arguments)) for job in jobs]


def _as_they_come(futures: Sequence[Future]) -> Generator[tuple[int, Outcome], None, None]:
    done: SimpleQueue[tuple[int, Future]] = SimpleQueue()
    for number, future in enumerate(futures):
        future.add_done_callback(lambda future, number=number: done.put((number, future)))
    for _ in futures:  # `as_completed` would not hear of those that are cancelled
        number, future = done.get()
        yield number, partial(_outcome, future)


class SharedProcesses:
    """Processes that take what several experiments submit, oldest first. One that is killed loses what it was at, and is replaced."""

    def __init__(self, count: int, pools: ExitStack) -> None:
        self._count, self._pools, self._closed = count, pools, False
        self._changed, self._unfinished = threading.Condition(), 0
        self._idle: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()  # of one process each
        for _ in range(count):
            self._idle.put(self._new())
        self._threads = ThreadPoolExecutor(count)  # one waits for each process

    def submit(self, function: Callable, /, *args) -> Future:
        """What `function(*args)` returns in one of the processes.

        Raises:
            RuntimeError: it is all over.
        """
        with self._changed:
            self._unfinished += 1
        future = self._threads.submit(self._in_a_process, function, *args)
        future.add_done_callback(self._one_less)
        return future

    def wait_for_room(self) -> None:
        """Return when nothing that was submitted waits for a process.

        Raises:
            CancelledError: it is all over.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._unfinished <= self._count or self._closed)
            if self._closed:
                raise CancelledError

    def close(self) -> None:
        """What has not begun never does, and no process is started any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _in_a_process(self, function: Callable, *args):
        pool = self._idle.get()
        try:
            return pool.submit(function, *args).result()
        except BrokenProcessPool:
            pool = self._new()
            raise
        finally:
            self._idle.put(pool)

    def _one_less(self, _future: Future) -> None:
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()

    def _new(self) -> ProcessPoolExecutor:
        with self._changed:
            if self._closed:
                raise CancelledError
            pool = self._pools.enter_context(_processes(1))
        with _ctrl_c_ignored():
            pool.submit(os.getpid)  # it starts here, and inherits it
        return pool


@contextmanager
def shared_processes(count: int) -> Iterator[SharedProcesses]:
    """Processes for work of several experiments, jobs and notebooks; none is left behind. One thread each if there are several."""
    with _started_with(QUIET | (ONE_THREAD if count > 1 else {})), ExitStack() as pools:
        shared = SharedProcesses(count, pools)
        try:
            yield shared
        finally:
            shared.close()


@contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool that leaves no process behind, however the block ends; pools around it are left alone."""
    others = multiprocessing.active_children()
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    pool = ProcessPoolExecutor(count, mp_context=spawn, initializer=_start_worker)
    try:
        yield pool
    except BaseException:
        _kill([process for process in multiprocessing.active_children() if process not in others])
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def _outcome(future: Future) -> tuple[Rows, float]:
    try:
        return future.result()
    except (BrokenProcessPool, CancelledError) as error:
        raise WorkerLost from error


def _start_worker() -> None:
    """Do not outlive the parent, and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()
        _kill(psutil.Process().children(recursive=True))
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Processes started here leave Ctrl-C to their parent from their first moment."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say so, and only it is interrupted
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _kill(processes: Sequence) -> None:
    """Kill processes and everything they started themselves."""
    for process in processes:
        try:
            family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for member in family:
                member.kill()
        except psutil.NoSuchProcess:
            continue


@contextmanager
def _started_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes that start in the block, and theirs, have these in their environment."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
