"""`specter-lab`: the same as the make targets and the notebooks, for the shell.

One command per file, each a `command.Command`; `parser.COMMANDS` lists them. Heavy imports wait until a command runs, so that
`--help` and completion answer at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout

from specter_lab.cli.command import (
    EXIT_CLOSED_PIPE,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    EXIT_USER_ERROR,
    Answer,
    Command,
)
from specter_lab.cli.parser import parse
from specter_lab.errors import UserError
from specter_lab.files import disk_problem


class Terminated(KeyboardInterrupt):
    """SIGTERM, as schedulers and containers send it: ends a command as Ctrl-C does, so that nothing is left running."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0; 2 for what the user can put right (a sentence says what and how); 130 for
    Ctrl-C and 143 for SIGTERM; 1 when `doctor` found something needed missing or nobody reads the output. A bug is raised."""
    command = None
    try:
        command, options = parse(sys.argv[1:] if arguments is None else arguments)
        as_json = getattr(options, "json", False)
        with _terminable(), redirect_stdout(sys.stderr) if as_json else nullcontext():
            answer = command.run(options)
        _print(answer, as_json)
        return answer.status
    except UserError as error:
        return _fail(str(error), EXIT_USER_ERROR)
    except Terminated:
        return _fail(_interrupted("SIGTERM", command), EXIT_TERMINATED)
    except KeyboardInterrupt:
        return _fail(_interrupted("Ctrl-C", command), EXIT_INTERRUPTED)
    except BrokenPipeError:  # `specter-lab table | head`: whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLOSED_PIPE
    except Exception as error:
        if sentence := disk_problem(error) or memory_problem(error):
            return _fail(sentence, EXIT_USER_ERROR)
        raise


def memory_problem(error: BaseException) -> str | None:
    """The way out when memory was refused, on host or GPU; None for any other error."""
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator" in str(error)
    ):
        return (f"not enough memory ({' '.join(str(error).split())[:120]}): close other programs, or ask for less (a smaller "
                f"model, --expert-budget or --max-tokens)")  # fmt: skip
    return None


def _print(answer: Answer, as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer.data, indent=1, allow_nan=False))
    elif answer.text:
        print(answer.text)
    sys.stdout.flush()  # or a closed pipe and a full disk would show only after the last word


@contextmanager
def _terminable() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupted(by: str, command: Command | None) -> str:
    return f"stopped by {by}{': ' + command.after_ctrl_c if command and command.after_ctrl_c else ''}"


def _fail(sentence: str, status: int) -> int:
    print(f"specter-lab: {sentence}", file=sys.stderr)
    return status
