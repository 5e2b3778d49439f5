"""Set-up says in one sentence what is missing, does nothing twice, and repairs what a kill left behind."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import psutil
import pytest

from specter_lab import setup_env
from specter_lab.setup_env import SetupError


@pytest.fixture
def clock():
    return setup_env.Clock()


@pytest.fixture
def this_python(tmp_path):
    """An 'environment' whose python is the one running the tests."""
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return tmp_path / "env"


def test_wrong_python(monkeypatch):
    monkeypatch.setattr(setup_env, "WANTED_PYTHON", (3, 99))
    with pytest.raises(SetupError, match=r"Python 3.99 is needed and not found \(.*is 3.11.*\): install it"):
        setup_env.find_python()


def test_no_disk(monkeypatch):
    monkeypatch.setattr(setup_env, "NEEDED_GIB", 10**9)
    with pytest.raises(SetupError, match="1000000000 GiB are needed: free some space"):
        setup_env.check_disk()


def test_no_registry(this_python, clock, monkeypatch):
    """A real pip, pointed at a port where nobody listens."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(SetupError, match="the package registry cannot be reached: check the network"):
        setup_env.pip(this_python, ["specter-lab-no-such-package==1.0"], clock)
    assert "specter-lab-no-such-package" in (this_python / "setup.log").read_text()


def test_no_such_package(this_python, clock, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        SetupError, match="the package registry has no specter-lab-no-such-package==1.0 for this machine"
    ):
        setup_env.pip(this_python, ["specter-lab-no-such-package==1.0"], clock)


def test_half_installed_packages_are_forgotten(tmp_path, clock):
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    for name, files in {"whole": ["whole.py"], "torn": ["torn.py", "lost.py"], "unrecorded": []}.items():
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        if files:
            (info / "RECORD").write_text("".join(f"{file},sha256=x,1\n" for file in files))
            (site / files[0]).touch()
    setup_env.repair(tmp_path, clock)
    assert [info.name for info in site.glob("*.dist-info")] == ["whole-1.0.dist-info"]


def test_the_stamp_follows_the_lock(tmp_path, capsys):
    """A real environment: made once, left alone while the lock is the same, completed when it changes."""
    venv, lock = tmp_path / "env", tmp_path / "a.lock"
    lock.write_text("# nothing\n")

    def set_up():
        setup_env.set_up(venv, lock, editable=False, index="", quiet=False, stamp=venv / ".stamp")
        return capsys.readouterr().out

    assert "virtual environment env with" in set_up()
    assert set_up() == "env is complete (a.lock)\n"
    lock.write_text("# still nothing\n")
    assert "env exists and is completed" in set_up()
    assert set_up() == "env is complete (a.lock)\n"


def test_two_set_ups_wait_for_each_other(tmp_path, capsys):
    """The second finds the environment made: it installs nothing, and clears nothing under the first."""
    venv, lock, calls = tmp_path / "env", tmp_path / "a.lock", []
    lock.write_text("# nothing\n")

    def set_up():
        setup_env.set_up(venv, lock, editable=False, index="", quiet=False, stamp=venv / ".stamp")

    with mock.patch.object(setup_env, "pip", lambda *arguments: calls.append(arguments) or time.sleep(1)):
        threads = [threading.Thread(target=set_up) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(calls) == 1 and "waiting for another set-up of env" in capsys.readouterr().out


def test_a_killed_set_up_leaves_no_pip_behind(this_python, tmp_path):
    """The pip of a set-up waits for a registry that never answers; kill -9 of the set-up ends both."""
    silent = socket.create_server(("127.0.0.1", 0))
    code = "import sys; from pathlib import Path; from specter_lab import setup_env; setup_env.pip(Path(sys.argv[1]), ['x'], setup_env.Clock())"
    environment = os.environ | {"PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/simple"}
    run = subprocess.Popen([sys.executable, "-c", code, str(this_python)], cwd=setup_env.ROOT, env=environment)
    silent.settimeout(60)
    connection, _ = silent.accept()
    (child,) = psutil.Process(run.pid).children()
    run.kill()
    run.wait()
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    connection.close()
    silent.close()


def test_a_disk_that_refuses_is_one_sentence(tmp_path):
    (tmp_path / "specter_lab").mkdir()
    for name in ("specter_lab/__init__.py", "specter_lab/setup_env.py", "requirements.lock"):
        (tmp_path / name).write_bytes((setup_env.ROOT / name).read_bytes())
    (tmp_path / ".venv").touch()
    done = subprocess.run([sys.executable, "-m", "specter_lab.setup_env"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("setup: ") and "File exists" in done.stderr and done.stderr.count("\n") == 1


def test_a_full_disk_is_one_sentence_whoever_meets_it_first(this_python, clock, monkeypatch, capsys):
    """pip, which says so, or set-up itself, at its log."""
    (this_python / "setup.log").symlink_to("/dev/full")
    with pytest.raises(OSError):
        setup_env.pip(this_python, ["--help"], clock)
    assert "the disk is full: free 4 GiB" in setup_env.diagnosis("ERROR: [Errno 28] No space left on device")

    def fill(*arguments):
        raise OSError(28, "No space left on device", "setup.log")

    monkeypatch.setattr(setup_env, "set_up", fill)
    monkeypatch.setattr(sys, "argv", ["setup_env"])
    assert setup_env.main() == 1
    assert capsys.readouterr().err.startswith("setup: the disk is full: free 4 GiB, here and in ")


def test_any_folder_and_locale_will_do(tmp_path):
    """Asked for the stamp in a folder whose name the locale cannot write."""
    folder = tmp_path / "with space and \u00e9"
    (folder / "specter_lab").mkdir(parents=True)
    for name in ("__init__.py", "setup_env.py"):
        shutil.copy(setup_env.ROOT / "specter_lab" / name, folder / "specter_lab")
    (folder / "a.lock").touch()
    code = "from specter_lab import setup_env; print(setup_env.stamp_key(setup_env.ROOT / 'a.lock', False))"
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert len(done.stdout.strip()) == 64, done.stderr
