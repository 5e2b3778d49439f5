"""`make setup`: a virtual environment with exactly the packages of a lock file.

Runs on the system's Python before anything is installed, so it is written for Python 3.6 and the standard library.
A stamp file in the environment, keyed on the lock file and this folder, says that it is complete; without the stamp
(first run, or killed half-way) whatever is there is checked, repaired and completed.
"""

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WANTED_PYTHON = (3, 11)
NEEDED_GIB = 4
HEARTBEAT_S = 10
PIP_OPTIONS = ["--progress-bar", "off", "--no-input", "--no-compile"]  # compiling all 20,000 files doubles the time
PIP_WITH_PARENT = """\
import ctypes, runpy, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed set-up leaves no pip behind
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
SYMPTOMS = (  # what pip says, what it means; the first that fits is reported
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full: free {needed} GiB, here and in {temporary} (TMPDIR moves that), and run the same command again",
    ),
    (
        r"NewConnectionError|ConnectTimeout|ReadTimeout|Max retries|name resolution|ProxyError|SSLError",
        "the package registry cannot be reached: check the network (and pip's proxy settings) and run it again",
    ),
    (r"No matching distribution found for (?P<what>\S+)", "the package registry has no {what} for this machine"),
    (r"ERROR: (?P<what>.+)", "it stopped with '{what}': put that right and run the same command again"),
)


class SetupError(Exception):
    """One sentence: what is missing, and the way out."""


class Clock:
    """Prints lines with the seconds since the start."""

    def __init__(self):
        self.start = time.monotonic()

    def say(self, text):
        print("[%4.0f s] %s" % (time.monotonic() - self.start, text), flush=True)


def main():
    parser = argparse.ArgumentParser(description="Create or complete a virtual environment from a lock file.")
    parser.add_argument("--venv", default=".venv")
    parser.add_argument("--lock", default="requirements.lock")
    parser.add_argument("--stamp", default=".stamp", help="file in the environment that says it is complete")
    parser.add_argument("--editable", action="store_true", help="install this project as well")
    parser.add_argument("--quiet", action="store_true", help="say nothing when there is nothing to do")
    parser.add_argument("--index", default=os.environ.get("TORCH_INDEX", ""), help="an extra package index (for torch)")
    options = parser.parse_args()
    try:
        venv = ROOT / options.venv
        set_up(venv, ROOT / options.lock, options.editable, options.index, options.quiet, venv / options.stamp)
    except SetupError as error:
        print("setup: %s" % error, file=sys.stderr)
        return 1
    except OSError as error:
        print("setup: %s" % diagnosis("ERROR: %s" % error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def set_up(venv, lock, editable, index, quiet, stamp):
    """Make `venv` hold the packages of `lock`; does nothing when the file `stamp` says so. Raises SetupError."""
    key = stamp_key(lock, editable)

    def complete():
        return stamp.exists() and stamp.read_bytes() == key.encode() and python_of(venv).exists()

    if complete():
        if not quiet:
            print("%s is complete (%s)" % (venv.name, lock.name))
        return
    clock = Clock()
    python = find_python()
    check_disk()
    venv.mkdir(parents=True, exist_ok=True)
    with locked(venv, clock):
        if not complete():  # else another set-up has just made it
            install(venv, lock, editable, index, clock, python)
            stamp.write_text(key)
        clock.say("%s is complete" % venv.name)


@contextmanager
def locked(venv, clock):
    """Hold the environment's lock: two terminals may set up at the same time. It falls when its holder ends."""
    handle = os.open(str(venv), os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            clock.say("waiting for another set-up of %s" % venv.name)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def install(venv, lock, editable, index, clock, python):
    """Create or complete the environment. Raises SetupError."""
    create(venv, python, clock)
    repair(venv, clock)
    clock.say("packages of %s (up to 2 minutes; log in %s/setup.log)" % (lock.name, venv.name))
    pip(venv, ["-r", str(lock)] + (["--extra-index-url", index] if index else []), clock)
    if editable:
        clock.say("this project, editable")
        pip(venv, ["--no-deps", "-e", str(ROOT)], clock)


def stamp_key(lock, editable):
    """Changes with the lock file, the project's own metadata, and the folder (environments cannot be moved)."""
    parts = [lock.read_bytes(), os.fsencode(str(ROOT))] + ([(ROOT / "pyproject.toml").read_bytes()] if editable else [])
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def python_of(venv):
    return venv / "bin" / "python"


def find_python():
    """Path of a Python of the wanted version: $PYTHON, python3.11, python3 or the one running this."""
    seen = []
    wanted = "%d.%d" % WANTED_PYTHON
    for name in filter(None, (os.environ.get("PYTHON"), "python" + wanted, "python3", sys.executable)):
        path = shutil.which(name)
        version = path and answer_of([path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
        if version == wanted:
            return path
        if version:
            seen.append("%s is %s" % (name, version))
    raise SetupError(
        "Python %s is needed and not found (%s): install it, or name it with `make setup PYTHON=/path/to/python%s`"
        % (wanted, ", ".join(seen) or "no Python here", wanted)
    )


def answer_of(command):
    """What a command prints, or None if it fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def check_disk():
    free_gib = shutil.disk_usage(str(ROOT)).free / 2**30
    if free_gib < NEEDED_GIB:
        raise SetupError(
            "%.1f GiB free in %s, %d GiB are needed: free some space, or clone the project on a larger disk"
            % (free_gib, ROOT, NEEDED_GIB)
        )


def create(venv, python, clock):
    """A virtual environment with a working pip; one left half-made is made again."""
    if answer_of([str(python_of(venv)), "-m", "pip", "--version"]):
        clock.say("%s exists and is completed" % venv.name)
        return
    clock.say("virtual environment %s with %s" % (venv.name, python))
    done = subprocess.run(
        [python, "-m", "venv", "--clear", str(venv)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        universal_newlines=True,
    )  # fmt: skip
    if done.returncode == 0:
        return
    if "No module named venv" in done.stdout or "ensurepip" in done.stdout:
        raise SetupError("%s has no venv module: install it (on Debian: apt-get install python3.11-venv)" % python)
    if "No space left" in done.stdout:
        raise SetupError("the disk is full: free %d GiB and run the same command again" % NEEDED_GIB)
    raise SetupError("%s -m venv failed: %s" % (python, (done.stdout.strip().splitlines() or ["no message"])[-1]))


def repair(venv, clock):
    """Forget packages that a killed installation left incomplete, so that pip installs them again."""
    for info in venv.glob("lib/python*/site-packages/*.dist-info"):
        record = info / "RECORD"
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        files = [line.rsplit(",", 2)[0].strip('"') for line in lines]
        if not files or not all((info.parent / file).exists() for file in files if not file.endswith(".pyc")):
            clock.say("%s was left incomplete and is installed again" % info.name.split("-")[0])
            shutil.rmtree(str(info))


def pip(venv, arguments, clock):
    """`pip install`, its full output in the log, a line of progress every few seconds. Raises SetupError."""
    command = [str(python_of(venv)), "-c", PIP_WITH_PARENT, "install"] + PIP_OPTIONS + arguments
    state = {"text": "starting", "packages": 0}
    finished = threading.Event()

    def heartbeat():
        while not finished.wait(HEARTBEAT_S):
            clock.say("  %s" % state["text"])

    threading.Thread(target=heartbeat, daemon=True).start()
    environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1")
    output = []
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, env=environment
    )
    try:
        with (venv / "setup.log").open("a", encoding="utf-8") as log:
            for line in process.stdout:
                log.write(line)
                output.append(line)
                follow(line, state)
        failed = process.wait() != 0
    finally:
        finished.set()
        if process.poll() is None:
            process.terminate()
    if failed:
        raise SetupError(diagnosis("".join(output)) + "; the full log is %s/setup.log" % venv.name)


def follow(line, state):
    """Keep in `state` what pip is doing."""
    if line.startswith("Collecting "):
        state["packages"] += 1
        state["text"] = "fetching %s (package %d)" % (line.split()[1], state["packages"])
    elif line.startswith("Installing collected packages"):
        state["text"] = "unpacking (%d in all)" % (line.count(",") + 1)
    elif line.startswith(("Building wheel", "  Building wheel")):
        state["text"] = line.strip()


def diagnosis(output):
    """What the output of pip, or an error, means in one sentence."""
    for pattern, sentence in SYMPTOMS:
        found = re.search(pattern, output)
        if found:
            what = found.groupdict().get("what", "")
            return sentence.format(needed=NEEDED_GIB, what=what, temporary=tempfile.gettempdir())
    return "pip failed without saying why"


if __name__ == "__main__":
    sys.exit(main())
