"""Rows survive kills, Ctrl-C leaves no process behind, errors name their row: with real processes and signals."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import psutil
import pytest

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.experiments import jobs, local_processes, provenance
from specter_lab.experiments.context import Context
from tests.experiments import toy
from tests.experiments.toy import started

CLI = (
    "import sys; from pathlib import Path; from tests.experiments import toy; toy.register(Path(sys.argv[1]), alone=True);"
    "from specter_lab.cli import main; sys.exit(main(sys.argv[2:]))"
)


def context(seed=0, fresh=False):
    return Context(toy.TOY.id, "cpu", seed, (), fresh)


def start_cli(tmp_path, chosen="toy-squares", **environment):
    command = [sys.executable, "-c", CLI, str(tmp_path), "reproduce", chosen]
    return subprocess.Popen(
        command, cwd=paths.ROOT, env={**os.environ, **environment}, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # the tests may run where Ctrl-C is ignored
    )  # fmt: skip


def wait_until(condition, what, timeout_s=180):  # a machine at work starts a process in a minute
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {timeout_s} s"
        time.sleep(0.05)


def stored_rows():
    return len(list((paths.CACHE / "rows").glob("*.json")))


def family(process):
    return [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]


def test_rows_come_in_the_order_of_the_jobs_and_from_the_cache(log):
    first = jobs.run(context(), toy.squares(context()))
    assert [row["square"] for row in first] == [0, 1, 4, 9]
    assert jobs.run(context(), toy.squares(context())) == first
    assert started(log) == {"0": 1, "1": 1, "2": 1, "3": 1}


def test_the_cache_key_is_everything_that_decides_a_row(log):
    jobs.run(context(), toy.squares(context(), count=1))
    assert jobs.run(context(seed=5), toy.squares(context(seed=5), count=1)) == [{"number": 0, "square": 0.5}]
    assert started(log) == {"0": 2}
    jobs.run(context(fresh=True), toy.squares(context(), count=1))
    assert started(log) == {"0": 3}


@pytest.mark.parametrize("damage", ["truncated", "empty", "no JSON object", "one digit"])
def test_a_damaged_row_is_computed_again(log, damage):
    rows = jobs.run(context(seed=3), toy.squares(context(seed=3), count=1))
    (file,) = (paths.CACHE / "rows").glob("*.json")
    text = file.read_text()
    damaged = {"truncated": text[:-4], "empty": "", "no JSON object": "[]", "one digit": text.replace("0.3", "0.7")}
    assert damaged[damage] != text
    file.write_text(damaged[damage])
    assert jobs.run(context(seed=3), toy.squares(context(seed=3), count=1)) == rows
    assert started(log) == {"0": 2}


def test_a_process_per_core_as_far_as_memory_goes(tmp_path):
    """The folder's weights are a sparse file of 10 TB: no second process fits beside one that holds them."""
    work = [jobs.Job(str(i), print, {"model": str(tmp_path)}) for i in range(2)]
    assert local_processes.worker_count(context(), work) == min(2, len(os.sched_getaffinity(0)))
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", 10 * 10**12)
    assert local_processes.worker_count(context(), work) == 1
    assert local_processes.worker_count(replace(context(), tier="gpu"), work) == 1


def test_a_row_that_is_removed_meanwhile_is_one_sentence(log, monkeypatch):
    monkeypatch.setattr(jobs, "_compute", lambda context, pending, bar: None)
    with pytest.raises(UserError, match="the row 'square of 0' was removed or altered .* run the command again"):
        jobs.run(context(), toy.squares(context()))


def test_an_error_names_its_row_and_the_rows_before_it_are_kept(log, monkeypatch):
    monkeypatch.setattr(local_processes, "worker_count", lambda context, jobs: 1)
    monkeypatch.setenv("TOY_FAIL", "2")
    with pytest.raises(UserError, match="^square of 2: it was told to fail"):
        jobs.run(context(), toy.squares(context()))
    assert stored_rows() >= 2
    assert not multiprocessing.active_children()


def test_a_killed_run_goes_on_where_it_stopped(log, tmp_path, monkeypatch):
    """Kill -9 of the main process alone: its workers follow, and finished rows are not computed again."""
    monkeypatch.setenv("TOY_SLEEP_S", "0.5")
    run = start_cli(tmp_path)
    wait_until(lambda: stored_rows() >= 2, "two rows")
    pids = family(run)
    run.kill()
    wait_until(lambda: not any(map(psutil.pid_exists, pids[1:])), "the end of the workers", timeout_s=60)
    run.communicate()
    finished = stored_rows()
    assert 2 <= finished < 4
    before = started(log)
    jobs.run(context(), toy.squares(context()))
    again = started(log) - before
    assert sum(again.values()) == 4 - finished and set(again.values()) == {1}


@pytest.mark.parametrize("chosen", ["toy-squares", "all"])
@pytest.mark.parametrize(
    "number, to_all, name, status",
    [(signal.SIGINT, True, "Ctrl-C", 130), (signal.SIGTERM, False, "SIGTERM", 143)],  # a terminal's, a scheduler's
)
def test_being_stopped_says_one_sentence_and_leaves_nothing_behind(log, tmp_path, number, to_all, name, status, chosen):
    run = start_cli(tmp_path, chosen, TOY_SLEEP_S="30")
    wait_until(lambda: started(log), "the first row")
    pids = family(run)
    (os.killpg if to_all else os.kill)(run.pid, number)
    _, stderr = run.communicate(timeout=120)
    assert run.returncode == status
    assert f"specter-lab: stopped by {name}: run the same command again, finished rows are kept\n" in stderr
    assert "Traceback" not in stderr and "Warning" not in stderr
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the end of all processes", timeout_s=60)


def test_a_failed_run_leaves_shared_processes_alone(log, monkeypatch):
    monkeypatch.setenv("TOY_FAIL", "0")
    with local_processes.shared_processes(2) as shared:
        with pytest.raises(UserError, match="^square of 0"):
            jobs.run(replace(context(), shared=shared), toy.squares(context(), count=1))
        worker = int(log.read_text().split()[1])
        assert psutil.pid_exists(worker)
        assert shared.submit(os.getenv, "OMP_NUM_THREADS").result() == "1"
    assert not multiprocessing.active_children()


def test_an_experiment_begins_when_nothing_waits_for_a_process(tmp_path):
    with local_processes.shared_processes(1) as shared:
        shared.wait_for_room()  # nothing was submitted
        first, second = (shared.submit(touched, str(tmp_path / name)) for name in "ab")
        shared.wait_for_room()
        assert first.done() and not second.done()
        (tmp_path / "b").touch()
        second.result()


def touched(path):
    """Ends when the file is there, but for `a`, which takes a second."""
    while not os.path.exists(path) and not path.endswith("a"):
        time.sleep(0.05)


def test_a_killed_process_costs_what_it_was_at_and_no_more(log):
    with local_processes.shared_processes(2) as shared:
        killed = shared.submit(os._exit, 1)
        rows = jobs.run(replace(context(), shared=shared), toy.squares(context()))
        with pytest.raises(BrokenProcessPool):
            killed.result()
        again = jobs.run(replace(context(), shared=shared, fresh=True), toy.squares(context()))
    assert [row["square"] for row in rows] == [row["square"] for row in again] == [0, 1, 4, 9]
    assert not multiprocessing.active_children()


def test_a_failed_experiment_takes_back_what_it_submitted(log, monkeypatch):
    monkeypatch.setenv("TOY_FAIL", "0")
    with local_processes.shared_processes(1) as shared:
        with pytest.raises(UserError, match="^square of 0"):
            jobs.run(replace(context(), shared=shared), toy.squares(context(), count=30))
        with pytest.raises(BrokenProcessPool):  # a kill behind it is somebody else's
            shared.submit(os._exit, 1).result()
        shared.wait_for_room()
        assert shared.submit(abs, -3).result() == 3
    assert len(log.read_text().splitlines()) < 5


def test_the_memory_of_processes_that_live_on_counts():
    kib = provenance._peak_process_kib() + 200 * 1024
    with local_processes.shared_processes(1) as shared:
        shared.submit(filled, kib * 1024).result()
        assert provenance._peak_process_kib() > kib


def filled(count):
    """Holds so many bytes for a moment."""
    return len(b"x" * count)


def test_ctrl_c_ends_shared_processes_and_no_new_ones_begin():
    with pytest.raises(KeyboardInterrupt), local_processes.shared_processes(2) as shared:
        shared.submit(time.sleep, 600)
        raise KeyboardInterrupt
    assert not multiprocessing.active_children()
    with pytest.raises(RuntimeError):
        shared.submit(os.getpid)
    with pytest.raises(CancelledError):
        shared.wait_for_room()
    assert not multiprocessing.active_children()


def test_jobs_that_must_run_alone_belong_to_a_listed_experiment(log):
    with pytest.raises(ValueError, match="toy-squares has jobs that must run alone: list it in registry.TIMED"):
        jobs.run(context(), [replace(job, alone=True) for job in toy.squares(context())])


def test_a_worker_that_is_killed_is_reported(log, tmp_path):
    run = start_cli(tmp_path, TOY_SLEEP_S="30")
    wait_until(lambda: started(log), "the first row")
    os.kill(int(log.read_text().split()[1]), signal.SIGKILL)
    _, stderr = run.communicate(timeout=120)
    assert run.returncode == 2
    assert "lack of memory" in stderr and "Traceback" not in stderr


@pytest.fixture
def disk(tmp_path):
    """Mounts a disk of its own, with options."""
    disk = tmp_path / "small-disk"
    disk.mkdir()

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("a disk can be mounted by root only")
        return disk

    yield mount
    subprocess.run(["umount", str(disk)], capture_output=True)


def test_a_full_disk_is_one_sentence_and_no_result(log, tmp_path, disk):
    small = disk("size=64k")
    (small / "filler").write_bytes(bytes(40_000))
    run = start_cli(tmp_path, SPECTER_LAB_OUT=str(small))
    _, stderr = run.communicate(timeout=180)
    assert run.returncode == 2, stderr
    assert "the disk is full" in stderr and "Traceback" not in stderr
    assert not list(small.glob("results/toy-squares/*"))


def test_a_read_only_output_folder_is_one_sentence(log, tmp_path, disk):
    run = start_cli(tmp_path, SPECTER_LAB_OUT=str(disk("ro")))
    _, stderr = run.communicate(timeout=180)
    assert run.returncode == 2, stderr
    assert "Read-only file system: give yourself access to it, or set SPECTER_LAB_OUT" in stderr
    assert "Traceback" not in stderr


def test_a_new_process_imports_no_model_code_by_itself():
    """Every worker imports the jobs' module; torch and transformers would take it five seconds."""
    code = "import sys, specter_lab.experiments.jobs; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
