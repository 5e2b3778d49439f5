"""Other people's systems: whether they are here, and what a row says of one that was not run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NOT_INSTALLED = "not run: not installed"


def found(looked_for: str) -> str | None:
    """The version of an installed package, or the path of a program; None: there is neither."""
    try:
        return version(looked_for)
    except PackageNotFoundError:
        return shutil.which(looked_for)


class NotRun(Exception):
    """Why a peer was not run."""


def output_of(command: Sequence[str], timeout_s: float, *, both: bool = False) -> str:
    """What a peer's command wrote to standard output, or to both.

    Raises:
        NotRun: it could not be started, failed, or took too long; what it had started is ended as well.
    """
    name = Path(command[0]).name
    try:
        running = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    except OSError as error:
        raise NotRun(f"not run: {name} cannot be started ({error.strerror})") from error
    try:
        told, complained = running.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)  # and what it started
        running.communicate()
        raise NotRun(f"not run: {name} did not end within {timeout_s:g} s") from None
    if running.returncode:
        lines = complained.strip().splitlines() or ["it said nothing"]
        raise NotRun(f"not run: {name} stopped: {lines[-1]}")
    return told + complained if both else told


def or_why(measure: Callable[..., dict], *arguments: object) -> dict:
    """A peer's row, or one that says why it was not run."""
    try:
        return measure(*arguments)
    except NotRun as why:
        return {"title": str(why)}
