"""The runner that needs nothing: one process per core of this machine, for one experiment or for several side by side."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue

import psutil
import torch

from specter_lab.experiments.context import Context
from specter_lab.experiments.job import Job, Outcome, Rows, WorkerLost, timed
from specter_lab.models.load import resolve, weight_bytes

WORKER_BYTES = 2 * 2**30  # one process with torch and a zoo model
GPU_WORKER_BYTES = 12 * 2**30  # on a GPU: its context, kernels, and what it keeps of batches
COPIES = 8  # of a BF16 checkpoint that a worker may hold: the target in float32, its draft, and what quantising needs
QUIET = {"TQDM_DISABLE": "1"}  # the bar of the whole run is the one to see
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


def worker_count(context: Context, jobs: Sequence[Job]) -> int:
    """Processes to use: one per core, as far as host memory and, beyond the cpu tier, GPU memory go."""
    models = {job.arguments["model"] for job in jobs if "model" in job.arguments}
    return min(process_count(context.tier, models), len(jobs))


def process_count(tier: str, models: Collection[str]) -> int:
    """Processes that hold one of these models each: at least one."""
    weights = COPIES * max((weight_bytes(resolve(model)) for model in models), default=0)
    held = psutil.virtual_memory().available // (WORKER_BYTES + weights)
    if tier != "cpu" and torch.cuda.is_available():
        held = min(held, torch.cuda.mem_get_info()[0] // (GPU_WORKER_BYTES + weights))
    return max(1, min(len(os.sched_getaffinity(0)), held))


def run(context: Context, jobs: Sequence[Job]) -> Generator[tuple[int, Outcome], None, None]:
    """Outcomes as they come. However it ends, Ctrl-C and closing included, no process is left behind."""
    if context.shared is not None:
        yield from _outcomes(context.shared, jobs)
        return
    workers = 1 if any(job.alone for job in jobs) else worker_count(context, jobs)
    with _started_with(QUIET | (ONE_THREAD if workers > 1 else {})), _processes(workers) as pool:
        yield from _outcomes(pool, jobs)


def _outcomes(pool: Executor, jobs: Sequence[Job]) -> Generator[tuple[int, Outcome], None, None]:
    with _ctrl_c_ignored():  # workers start here, and inherit it
        numbers = {pool.submit(timed, job.function, dict(job.arguments)): i for i, job in enumerate(jobs)}
    done: SimpleQueue[Future] = SimpleQueue()
    for future in numbers:
        future.add_done_callback(done.put)  # `as_completed` would not hear of those that a pool cancels at its end
    try:
        for _ in numbers:
            future = done.get()
            yield numbers[future], partial(_outcome, future)
    finally:
        for future in numbers:
            future.cancel()  # whoever stops listening wants no more of them; a pool that is shared goes on


class SharedProcesses(Executor):
    """Processes that take what several experiments submit, oldest first.

    When one is killed, all that was submitted is lost; what is submitted next gets new ones.
    """

    def __init__(self, count: int, pools: ExitStack) -> None:
        self._count, self._pools, self._open = count, pools, True
        self._changed, self._unfinished = threading.Condition(), 0
        self._pool = self._new()

    def submit(self, function: Callable, /, *args, **kwargs) -> Future:
        with self._changed:
            try:
                future = self._pool.submit(function, *args, **kwargs)
            except BrokenProcessPool:
                if not self._open:
                    raise
                self._pool = self._new()
                future = self._pool.submit(function, *args, **kwargs)
            self._unfinished += 1
        future.add_done_callback(self._one_less)
        return future

    def wait_for_room(self) -> None:
        """Return when nothing that was submitted waits for a process, or all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._unfinished <= self._count or not self._open)

    def close(self) -> None:
        """No new processes from now on."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def _one_less(self, _future: Future) -> None:
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()

    def _new(self) -> ProcessPoolExecutor:
        pool = self._pools.enter_context(_processes(self._count))
        with _ctrl_c_ignored():
            for _ in range(self._count):
                pool.submit(os.getpid)  # they start here, and inherit it
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
    """Do not outlive the parent."""
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
