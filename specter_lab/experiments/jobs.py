"""Independent rows, wherever they are computed: a finished row is on disk, so a killed run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread

from tqdm.auto import tqdm

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.experiments import local_processes, ray_cluster
from specter_lab.experiments.context import Context
from specter_lab.experiments.job import Job, Outcome, Rows, Runner, WorkerLost
from specter_lab.experiments.provenance import code_digest
from specter_lab.experiments.registry import TIMED
from specter_lab.files import write_whole

RUNNERS: dict[str, Runner] = {"local": local_processes.run, "ray": ray_cluster.run}


def run(context: Context, jobs: Sequence[Job]) -> Rows:
    """The rows of all jobs, in the order of the jobs; those already on disk are not computed again.

    Raises:
        UserError: a job could not be done (the message starts with its name), its process was killed, or there is no
            such runner.
    """
    if any(job.alone for job in jobs) and context.experiment not in TIMED:
        raise ValueError(f"{context.experiment} has jobs that must run alone: list it in registry.TIMED")
    files = [_row_file(context, job) for job in jobs]
    pending = [(job, file) for job, file in zip(jobs, files) if context.fresh or _load(file) is None]
    if pending:
        total = sum(job.cost for job in jobs)
        with _progress(context, total, done=total - sum(job.cost for job, _ in pending)) as bar, _clock_runs(bar):
            _compute(context, pending, bar)
    return [row for job, file in zip(jobs, files) for row in _stored(job, file)]


def _compute(context: Context, pending: Sequence[tuple[Job, Path]], bar: tqdm) -> None:
    """Store rows as they finish. A row whose worker was lost is reported at the end; any other error stops the run."""
    lost = []
    with closing(_runner(context.runner)(context, [job for job, _ in pending])) as outcomes:
        for number, outcome in outcomes:
            job, file = pending[number]
            try:
                _store(file, job, *_rows_of(job, outcome))
            except WorkerLost:
                lost.append(job.name)
                continue
            bar.set_postfix_str(job.name, refresh=False)
            bar.update(job.cost)
    if lost:
        raise UserError(
            f"the process of {len(lost)} row(s) was killed ({lost[0]} or one beside it), most likely for lack of "
            f"memory: close other programs and run the same command again, finished rows are kept"
        )


def _rows_of(job: Job, outcome: Outcome) -> tuple[Rows, float]:
    try:
        return outcome()
    except UserError as error:
        raise UserError(f"{job.name}: {error}") from error
    except Exception as error:
        error.add_note(f"in row '{job.name}'")
        raise


def _runner(name: str) -> Runner:
    if name not in RUNNERS:
        raise UserError(f"no runner '{name}': give one of {', '.join(RUNNERS)}")
    return RUNNERS[name]


def _progress(context: Context, total: float, done: float) -> tqdm:
    return tqdm(
        total=total, initial=done, desc=context.experiment, mininterval=1.0, dynamic_ncols=True,
        bar_format="{desc} {percentage:3.0f} %|{bar:24}| {elapsed} elapsed, {remaining} left{postfix}",
    )  # fmt: skip


@contextmanager
def _clock_runs(bar: tqdm) -> Iterator[None]:
    """On a terminal the time goes on while rows are computed that take minutes."""
    ended = Event()

    def tick() -> None:
        while not ended.wait(1.0):
            bar.refresh()

    ticking = Thread(target=tick, daemon=True)
    if sys.stderr.isatty():
        ticking.start()
    try:
        yield
    finally:
        ended.set()
        if ticking.is_alive():
            ticking.join()


def _row_file(context: Context, job: Job) -> Path:
    """Where a job's rows lie: named by everything that decides them."""
    key = {
        "experiment": context.experiment,
        "code": code_digest(context.experiment),
        "function": f"{job.function.__module__}.{job.function.__qualname__}",
        "arguments": job.arguments,
    }
    return paths.CACHE / "rows" / f"{_digest(key)}.json"


def _stored(job: Job, file: Path) -> Rows:
    rows = _load(file)
    if rows is None:
        raise UserError(
            f"the row '{job.name}' was removed or altered while others were computed: run the command again"
        )
    return rows


def _load(file: Path) -> Rows | None:
    """Stored rows; None if there are none, or not those that were stored."""
    try:
        stored = json.loads(file.read_bytes())
        return stored["rows"] if stored["sha256"] == _digest(stored["rows"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store(file: Path, job: Job, rows: Rows, seconds: float) -> None:
    content = {"name": job.name, "seconds": round(seconds, 2), "sha256": _digest(rows), "rows": rows}
    write_whole(file, json.dumps(content).encode())


def _digest(value: object) -> str:
    """sha256 over a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
