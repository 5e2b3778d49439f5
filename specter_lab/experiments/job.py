"""One unit of work, and what a runner makes of it.

A runner computes jobs somewhere, each in a process that may be killed, and hands their outcomes back as they finish:
`local_processes` on this machine, `ray_cluster` on many. What is stored, and shown, is `jobs.run`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from specter_lab.experiments.context import Context

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
    alone: bool = False  # it measures times: no other job runs beside it


class WorkerLost(Exception):
    """The process that computed a job was killed, or its machine was; the job itself has said nothing."""


Outcome = Callable[[], tuple[Rows, float]]  # rows and seconds; raises what the job raised, or WorkerLost
Runner = Callable[[Context, Sequence[Job]], Generator[tuple[int, Outcome], None, None]]  # job number, outcome


def timed(function: Callable[..., Rows], arguments: dict) -> tuple[Rows, float]:
    """The rows of a job and the seconds they took; called in the worker."""
    start = time.perf_counter()
    return function(**arguments), time.perf_counter() - start
