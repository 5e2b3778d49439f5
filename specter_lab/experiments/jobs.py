"""Independent rows on local processes: every finished row is on disk, so a killed run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from tqdm.auto import tqdm

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.experiments.context import Context
from specter_lab.experiments.provenance import code_digest

WORKER_BYTES = 2 * 2**30  # one process with torch, a zoo model and its quantised copy
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

Rows = list[dict]  # tidy: one dict per row, values that JSON can hold


@dataclass(frozen=True)
class Job:
    """One unit of work.

    `function(**arguments)` must be importable by name and return rows. Everything that decides its result stands in
    `arguments` (JSON values; models and files as digest too): together with the code they are the cache key.
    """

    name: str  # shown to the user: "qwen-nano, GPTQ 4 bit"
    function: Callable[..., Rows]
    arguments: Mapping
    cost: float = 1.0  # expected work relative to the other jobs, for the time left


def run(context: Context, jobs: Sequence[Job]) -> Rows:
    """The rows of all jobs, in the order of the jobs; those already on disk are not computed again.

    Raises:
        UserError: a job could not be done (the message starts with its name), or its process was killed.
    """
    files = [_row_file(context, job) for job in jobs]
    pending = [(job, file) for job, file in zip(jobs, files) if context.fresh or _load(file) is None]
    if pending:
        total = sum(job.cost for job in jobs)
        with _progress(context, total, done=total - sum(job.cost for job, _ in pending)) as bar:
            _compute(pending, worker_count(context, len(pending)), bar)
    return [row for file in files for row in _load(file)]


def worker_count(context: Context, jobs: int) -> int:
    """Processes to use: one per core on the cpu tier as far as memory goes, one where a model fills the machine."""
    if context.tier != "cpu":
        return 1
    by_memory = int(psutil.virtual_memory().available // WORKER_BYTES)
    return max(1, min(len(os.sched_getaffinity(0)), by_memory, jobs))


def _compute(pending: Sequence[tuple[Job, Path]], workers: int, bar: tqdm) -> None:
    """Compute and store rows as they finish. After any error, Ctrl-C included, no process is left behind."""
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with _one_thread_each(workers):
        pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker)
        try:
            futures = {pool.submit(_timed, job.function, dict(job.arguments)): (job, file) for job, file in pending}
            for future in as_completed(futures):
                job, file = futures[future]
                _store(file, job, *_outcome(future, job))
                bar.set_postfix_str(job.name, refresh=False)
                bar.update(job.cost)
        except BaseException:
            _kill(multiprocessing.active_children())
            pool.shutdown(cancel_futures=True)
            raise
        pool.shutdown()


def _outcome(future: Future, job: Job) -> tuple[Rows, float]:
    try:
        return future.result()
    except UserError as error:
        raise UserError(f"{job.name}: {error}") from error
    except BrokenProcessPool as error:
        raise UserError(
            f"the process of a row ({job.name} or one beside it) was killed, most likely for lack of memory: close "
            f"other programs and run the same command again, finished rows are kept"
        ) from error
    except Exception as error:
        error.add_note(f"in row '{job.name}'")
        raise


def _timed(function: Callable[..., Rows], arguments: dict) -> tuple[Rows, float]:
    start = time.perf_counter()
    return function(**arguments), time.perf_counter() - start


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()
        _kill(psutil.Process().children(recursive=True))
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


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
def _one_thread_each(workers: int) -> Iterator[None]:
    """Workers read these when they start: one thread per process as soon as there are two."""
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    if workers > 1:
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _progress(context: Context, total: float, done: float) -> tqdm:
    return tqdm(
        total=total, initial=done, desc=context.experiment, mininterval=1.0, dynamic_ncols=True,
        bar_format="{desc} {percentage:3.0f} %|{bar:24}| {elapsed} elapsed, {remaining} left{postfix}",
    )  # fmt: skip


def _row_file(context: Context, job: Job) -> Path:
    """Where a job's rows lie: named by everything that decides them."""
    key = {
        "experiment": context.experiment,
        "code": code_digest(context.experiment),
        "function": f"{job.function.__module__}.{job.function.__qualname__}",
        "arguments": job.arguments,
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return paths.CACHE / "rows" / f"{name}.json"


def _load(file: Path) -> Rows | None:
    try:
        return json.loads(file.read_text())["rows"]
    except (OSError, ValueError, KeyError):
        return None


def _store(file: Path, job: Job, rows: Rows, seconds: float) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_suffix(f".{os.getpid()}")
    half.write_text(json.dumps({"name": job.name, "seconds": round(seconds, 2), "rows": rows}))
    os.replace(half, file)
