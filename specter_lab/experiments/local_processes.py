"""The runner that needs nothing: one process per core of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial

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
    weights = COPIES * max((weight_bytes(resolve(model)) for model in models), default=0)
    held = psutil.virtual_memory().available // (WORKER_BYTES + weights)
    if context.tier != "cpu" and torch.cuda.is_available():
        held = min(held, torch.cuda.mem_get_info()[0] // (GPU_WORKER_BYTES + weights))
    return max(1, min(len(os.sched_getaffinity(0)), held, len(jobs)))


def run(context: Context, jobs: Sequence[Job]) -> Generator[tuple[int, Outcome], None, None]:
    """Outcomes as they come. However it ends, Ctrl-C and closing included, no process is left behind."""
    workers = 1 if any(job.alone for job in jobs) else worker_count(context, jobs)
    with _started_with(QUIET | (ONE_THREAD if workers > 1 else {})), _processes(workers) as pool:
        with _ctrl_c_ignored():  # workers start here, and inherit it
            numbers = {pool.submit(timed, job.function, dict(job.arguments)): i for i, job in enumerate(jobs)}
        for future in as_completed(numbers):
            yield numbers[future], partial(_outcome, future)


@contextmanager
def process_beside() -> Iterator[Executor]:
    """One process for what can be done while others compute; it and its children have one thread each."""
    with _processes(1) as pool:
        with _started_with(ONE_THREAD), _ctrl_c_ignored():
            pool.submit(os.getpid)  # it starts here, and inherits both
        yield pool


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
    except BrokenProcessPool as error:
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
