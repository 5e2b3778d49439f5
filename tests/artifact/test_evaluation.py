"""What an evaluator may do: read-only checkout, no network, runs twice and in any order.

Kill and resume are in tests/experiments/test_jobs.py and test_results.py.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specter_lab.paths import ROOT

QUICK = ("specter-memory", "specter-latency-breakdown")  # a minute together, on two cores
READ_ONLY = (
    'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'  # for root, whom no mode stops
)
RUN = """
from specter_lab.experiments.run import run
for name in {names}:
    run(name)
"""


def possible(*command):
    return shutil.which(command[0]) and subprocess.run([*command, "true"], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the project without write bits."""
    root = tmp_path_factory.mktemp("checkout") / "project"
    for name in ("specter_lab", "notebooks", "data", "artifacts/recorded"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("artifacts/claims.toml", "artifacts/papers.toml", "CONTRIBUTING.md", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    entries = [root, *root.rglob("*")]
    for path in entries:
        path.chmod(path.stat().st_mode & ~0o222)
    yield root
    for path in entries:
        path.chmod(path.stat().st_mode | 0o200)


@pytest.fixture(scope="module")
def alone(checkout):
    """Runs a Python module on the read-only checkout without a network; returns what it prints."""
    if os.geteuid() == 0:
        if not possible("unshare", "--net", "--mount"):
            pytest.skip("root, and no namespaces to be kept from writing by")
        before = ["unshare", "--net", "--mount", "sh", "-c", READ_ONLY, "sh", str(checkout)]
    elif possible("unshare", "--map-root-user", "--net"):
        before = ["unshare", "--map-root-user", "--net"]
    else:
        before = []  # read-only by its modes; the network stays

    def run(out, *arguments):
        environment = os.environ | {"PYTHONPATH": str(checkout), "SPECTER_LAB_OUT": str(out), "OMP_NUM_THREADS": "1"}
        command = [*before, sys.executable, *arguments]
        return subprocess.run(command, cwd=out.parent, env=environment, capture_output=True, text=True, timeout=900)

    return run


def answer(out: Path, experiment: str) -> tuple[bytes, list, bytes]:
    """What a run says: rows, claims and figure; provenance has the time of day."""
    folder = out / "results" / experiment / "cpu"
    return (
        (folder / "rows.csv").read_bytes(),
        json.loads((folder / "claims.json").read_text()),
        (folder / "figure.png").read_bytes(),
    )


@pytest.fixture(scope="module")
def first(alone, tmp_path_factory):
    """One run of the quick experiments, the first with its notebook."""
    out = tmp_path_factory.mktemp("first") / "out"
    done = alone(out, "-m", "specter_lab.cli", "reproduce", QUICK[0])
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{QUICK[0]}: notebook executed" in done.stdout
    done = alone(out, "-c", RUN.format(names=QUICK[1:]))
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def test_the_checkout_cannot_be_written_and_the_network_is_not_there(alone, checkout, tmp_path):
    attempts = f"""
import socket
from pathlib import Path
try:
    Path({str(checkout / "artifacts" / "new")!r}).touch()
    print("written")
except OSError:
    print("read-only")
print([name for _, name in socket.if_nameindex()])
"""
    done = alone(tmp_path / "out", "-c", attempts)
    written, interfaces = done.stdout.splitlines()
    assert written == "read-only"
    if shutil.which("unshare") and os.geteuid() == 0:
        assert interfaces == "['lo']"


def test_a_read_only_checkout_without_a_network_reproduces(first, checkout):
    for name in QUICK:
        files = {file.name for file in (first / "results" / name / "cpu").iterdir()}
        assert files >= {"rows.csv", "claims.json", "figure.png", "provenance.json"}
        assert ("notebook.ipynb" in files) == (name == QUICK[0])
    assert not list(checkout.rglob("__pycache__")) and not (checkout / "artifacts" / "results").exists()


def test_its_results_agree_with_the_recorded_ones(first):
    for name in QUICK:
        recorded = json.loads((ROOT / "artifacts" / "recorded" / name / "cpu" / "claims.json").read_text())
        assert [(one["id"], one["verdict"]) for one in answer(first, name)[1]] == [
            (one["id"], one["verdict"]) for one in recorded
        ]


def test_again_and_in_the_other_order_they_say_the_same(alone, first, tmp_path):
    """Into an empty folder, both in one process and the other way round: no run leans on another's cache or random state."""
    done = alone(tmp_path / "out", "-c", RUN.format(names=QUICK[::-1]))
    assert done.returncode == 0, done.stderr[-3000:]
    for name in QUICK:
        assert answer(tmp_path / "out", name) == answer(first, name)


def test_verify_works_there_and_judges_your_results_too(alone, first):
    done = alone(first, "-m", "specter_lab.artifact.verify")
    assert "ok    your verdicts judged again from their rows (2 of 2 runs)" in done.stdout
    assert "ok    recorded verdicts judged again" in done.stdout
