"""The same rows on a real Ray cluster of two nodes, one of which is killed in the middle."""

import importlib
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.experiments import jobs, ray_cluster
from specter_lab.experiments.context import Context
from tests.experiments import toy
from tests.experiments.toy import started

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
needs_ray = pytest.mark.usefixtures("cluster")


def context():
    return Context(toy.TOY.id, "cpu", 0, (), False, runner="ray")


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one core each: two raylets with their own workers, on this machine."""
    pytest.importorskip("ray", reason="ray is not installed: `make setup-ray`")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(paths.ROOT))  # workers inherit the environment of their node
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = start_cluster()
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


def start_cluster(attempts=3):
    """Ray gives a node 30 s to start, which is little on a machine that others use."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(**NODE, include_dashboard=False)
    except Exception as error:
        cluster.shutdown()
        if attempts == 1 or "imed out" not in str(error):
            raise
        return start_cluster(attempts - 1)
    return cluster


def kill_soon(log, pid_of, delay_s=0.5):
    """In the background: as soon as a row runs for whose process `pid_of` names a victim, kill that and its children."""

    def wait_and_kill():
        deadline = time.monotonic() + 240  # a busy machine starts Ray in a minute
        while time.monotonic() < deadline:
            pids = [int(line.split()[1]) for line in log.read_text().splitlines()] if log.exists() else []
            victims = [victim for pid in pids if (victim := pid_of(pid)) is not None]
            if victims:
                time.sleep(delay_s)
                victim = psutil.Process(victims[0])
                for process in [victim, *victim.children(recursive=True)]:
                    process.kill()
                return
            time.sleep(0.05)

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    return thread


@needs_ray
def test_a_killed_node_loses_no_row(cluster, log, monkeypatch):
    monkeypatch.setenv("TOY_SLEEP_S", "1.5")
    doomed = cluster.worker_nodes.copy().pop()
    raylet = doomed.all_processes["raylet"][0].process.pid

    def raylet_of(pid):
        return raylet if psutil.pid_exists(pid) and raylet in [p.pid for p in psutil.Process(pid).parents()] else None

    killer = kill_soon(log, raylet_of)
    rows = jobs.run(context(), toy.squares(context(), count=6))
    killer.join()
    assert psutil.Process(raylet).status() == psutil.STATUS_ZOMBIE
    assert [row["square"] for row in rows] == [n**2 for n in range(6)]
    pids = {line.split()[1] for line in log.read_text().splitlines()}
    assert len(pids) >= 2, "both nodes took rows"
    assert sum(started(log).values()) == 7, "the row that was running on the killed node was started again, no other"
    before = started(log)
    assert jobs.run(replace(context(), runner="local"), toy.squares(context(), count=6)) == rows
    assert started(log) == before, "rows do not depend on the runner that computed them"


@needs_ray
def test_a_row_that_is_lost_for_good_is_the_only_one_computed_again(log, monkeypatch):
    monkeypatch.setenv("TOY_SLEEP_S", "1")
    monkeypatch.setattr(ray_cluster, "ATTEMPTS", 1)
    killer = kill_soon(log, lambda pid: pid, delay_s=0)
    with pytest.raises(UserError, match=r"process of 1 row\(s\) was killed \(square of 0"):
        jobs.run(context(), toy.squares(context(), count=3))
    killer.join()
    assert started(log) == {"0": 1, "1": 1, "2": 1}
    assert [row["square"] for row in jobs.run(context(), toy.squares(context(), count=3))] == [0, 1, 4]
    assert started(log) == {"0": 2, "1": 1, "2": 1}


@needs_ray
def test_errors_of_a_row_name_it(log, monkeypatch):
    monkeypatch.setenv("TOY_FAIL", "1")
    with pytest.raises(UserError, match="^square of 1: it was told to fail: tell it not to$"):
        jobs.run(context(), toy.squares(context(), count=2))
    monkeypatch.setattr(ray_cluster, "source_digest", lambda module: "0" * 64)
    with pytest.raises(UserError, match="^square of 1: node .* has another version of the code"):
        jobs.run(context(), toy.squares(context(), count=2))


@needs_ray
def test_a_node_that_lacks_the_code_is_told_apart(log, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def row():\n    return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    only_here = importlib.import_module("only_here")
    with pytest.raises(UserError, match="^far away: a node cannot load the row .*No module named 'only_here'.*: start"):
        jobs.run(context(), [jobs.Job("far away", only_here.row, {})])


def test_a_cluster_that_is_not_there(log, monkeypatch):
    pytest.importorskip("ray", reason="ray is not installed: `make setup-ray`")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(
        UserError, match="Ray at 127.0.0.1:9 does not answer .*: run `.venv/bin/ray start --head` there"
    ):
        jobs.run(context(), toy.squares(context(), count=1))


def test_without_ray_and_with_an_unknown_runner(log, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="RUNNER=ray needs Ray: install it with `make setup-ray`"):
        jobs.run(context(), toy.squares(context()))
    with pytest.raises(UserError, match="no runner 'slurm': give one of local, ray"):
        jobs.run(replace(context(), runner="slurm"), toy.squares(context()))
    assert not log.exists()


def test_a_big_model_gets_a_node_of_its_own():
    nodes = [
        {"Alive": True, "Resources": {"CPU": 0.0}},
        {"Alive": True, "Resources": {"CPU": 16.0, "GPU": 1.0}},
        {"Alive": True, "Resources": {"CPU": 24.0, "GPU": 2.0}},
        {"Alive": False, "Resources": {"CPU": 1.0, "GPU": 1.0}},
    ]
    assert ray_cluster._share_of_a_node(context(), nodes) == {"num_cpus": 1}
    assert ray_cluster._share_of_a_node(replace(context(), tier="gpu"), nodes) == {"num_cpus": 16, "num_gpus": 1}
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0}}]
    assert ray_cluster._share_of_a_node(replace(context(), tier="paper"), nodes) == {"num_cpus": 8, "num_gpus": 0}
