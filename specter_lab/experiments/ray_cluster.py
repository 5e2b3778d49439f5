"""The runner for sweeps that outgrow one machine: the same jobs on a Ray cluster (`RUNNER=ray`).

    make setup-ray                                  on every machine, in a checkout of the same version
    .venv/bin/ray start --head                      on one machine
    .venv/bin/ray start --address=HEAD:6379         on the others
    make reproduce-table1 RUNNER=ray                on the first; RAY_ADDRESS names a cluster elsewhere

Without a cluster, Ray starts one on this machine. Rows come back to the machine that asked, so a run goes on where it
stopped whatever cluster it gets next. Quantised models stay in the cache of the node that made them; models given by
path must lie there on every node. A row whose worker or node is killed is computed again, elsewhere if need be.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from specter_lab.errors import UserError
from specter_lab.experiments.context import Context
from specter_lab.experiments.job import Job, Outcome, Rows, WorkerLost, timed
from specter_lab.experiments.provenance import source_digest
from specter_lab.experiments.registry import find

ATTEMPTS = 3  # times a row is started before it counts as lost; errors of the row itself are not tried again
CONNECT_S = 10


def run(context: Context, jobs: Sequence[Job]) -> Generator[tuple[int, Outcome], None, None]:
    """Outcomes as they come, from all nodes.

    Raises:
        UserError: Ray is not installed, or its cluster cannot be reached.
    """
    with _connected() as ray:
        row = ray.remote(max_retries=ATTEMPTS - 1, **_share_of_a_node(context, ray.nodes()))(_row)
        module = find(context.experiment).module
        code = source_digest(module)
        numbers = {row.remote(module, code, job.function, dict(job.arguments)): i for i, job in enumerate(jobs)}
        waiting = list(numbers)
        while waiting:
            (done,), waiting = ray.wait(waiting)
            yield numbers[done], partial(_outcome, ray, done)


def _row(module: str, code: str, function: Callable[..., Rows], arguments: dict) -> tuple[Rows, float]:
    """Runs on a node, whose source must be the one that the row will be stored under."""
    if source_digest(module) != code:
        raise UserError(f"node {os.uname().nodename} has another version of the code: check out the same one there")
    return timed(function, arguments)


def _outcome(ray, done) -> tuple[Rows, float]:
    try:
        return ray.get(done)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ray.exceptions.RaySystemError):  # the job never began: its function is not there
            raise UserError(f"a node cannot load the row ({str(error.cause).splitlines()[0]}): start Ray there with "
                            f"the `.venv/bin/ray` of a checkout that is set up") from error  # fmt: skip
        raise error.cause from error
    except ray.exceptions.RayError as error:  # everything else that Ray reports: worker, node or object lost
        raise WorkerLost from error


def _share_of_a_node(context: Context, nodes: Sequence[dict]) -> dict[str, float]:
    """What one row takes of a node: a core on the cpu tier, all of it where a model fills the machine."""
    if context.tier == "cpu":
        return {"num_cpus": 1}
    resources = [node["Resources"] for node in nodes if node["Alive"] and node["Resources"].get("CPU")]
    resources = [node for node in resources if node.get("GPU")] or resources
    return {"num_cpus": min(n["CPU"] for n in resources), "num_gpus": min(n.get("GPU", 0) for n in resources)}


def _knock(address: str) -> None:
    """Raise OSError when nothing listens at an address `host:port`; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


@contextmanager
def _connected() -> Iterator:
    """The ray package, connected to the cluster of RAY_ADDRESS, else of this machine, else to a new one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError("RUNNER=ray needs Ray: install it with `make setup-ray`") from error
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        _knock(address)
        ray.init(log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # not reachable, or not started in time: Ray has no one type for it
        raise UserError(f"Ray at {address or 'this machine'} does not answer ({str(error).splitlines()[0]}): run "
                        f"`.venv/bin/ray start --head` there, then the same command again") from error  # fmt: skip
    try:
        yield ray
    finally:
        ray.shutdown()
