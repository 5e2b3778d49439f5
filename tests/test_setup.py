"""Set-up says in one sentence what is missing, does nothing twice, and repairs what a kill left behind."""

import sys

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
