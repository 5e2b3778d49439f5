"""Other people's systems: whether they are here, and what a row says of one that was not run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NOT_INSTALLED = "not run: not installed"


def found(looked_for: str) -> str | None:
    """The version of an installed package, or the path of a program; None: there is neither."""
    try:
        return version(looked_for)
    except PackageNotFoundError:
        return shutil.which(looked_for)


def output_of(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str] | str:
    """What a peer's command said when it ended well, or why it was not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"not run: {Path(command[0]).name} did not end within {timeout_s:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        return f"not run: {Path(command[0]).name} stopped: {lines[-1]}"
    return done
