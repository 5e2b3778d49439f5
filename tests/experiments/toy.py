"""A complete experiment of a few lines: what the tests run where a real one would take minutes."""

import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.experiments import jobs, registry
from specter_lab.experiments.context import Context, Measured

TOY = registry.Experiment("toy-squares", "squares", "none", "none", "tests.experiments.toy", {"cpu": 1}, ("squares",))
AGAIN = replace(TOY, id="toy-again", module="tests.experiments.toy_again", aliases=("again",))
CLAIMS = """
[toy-squares.largest]
text = "the largest square"
kind = "threshold"
at_least = 9.0
unit = "x"
source = "C"
"""


def register(folder: Path, alone: bool = False) -> None:
    """Make the toys known in this process, `alone` or beside the others; their claims file is written into `folder`."""
    if alone:
        registry.EXPERIMENTS.clear()
    registry.EXPERIMENTS |= {toy.id: toy for toy in (TOY, AGAIN)}
    paths.CLAIMS = folder / "claims.toml"
    paths.CLAIMS.write_text(CLAIMS)


def started(log: Path) -> Counter:
    """How often each row was started, from its log."""
    return Counter(line.split()[0] for line in log.read_text().splitlines()) if log.exists() else Counter()


def square(number: int, seed: int, sleep_s: float, log: str, fail: str, lines: int) -> list[dict]:
    """One row. Every call adds a line `number pid` to `log` when it starts; the last number waits for so many `lines`."""
    with open(log, "a") as file:
        file.write(f"{number} {os.getpid()}\n")
    time.sleep(sleep_s)
    deadline = time.monotonic() + 60
    while number == 3 and len(Path(log).read_text().splitlines()) < lines:
        if time.monotonic() > deadline:
            raise UserError(f"no {lines} rows have started in a minute: start them")
        time.sleep(0.05)
    if fail == str(number):
        raise UserError("it was told to fail: tell it not to")
    return [{"number": number, "square": number**2 + 0.1 * seed}]


def inputs(context: Context) -> dict[str, str]:
    return {}


def squares(context: Context, count: int = 4) -> list[jobs.Job]:
    rest = {
        "seed": context.seed,
        "sleep_s": float(os.environ.get("TOY_SLEEP_S", "0")),
        "log": os.environ["TOY_LOG"],
        "fail": os.environ.get("TOY_FAIL", ""),
        "lines": int(os.environ.get("TOY_LINES", "0")),
    }
    return [jobs.Job(f"square of {n}", square, {"number": n, **rest}) for n in range(count)]


def run(context: Context) -> pd.DataFrame:
    return pd.DataFrame(jobs.run(context, squares(context)))


def plot(rows: pd.DataFrame):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3, 2))
    figure.subplots().plot(rows["number"], rows["square"])
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    return [Measured("toy-squares/largest", float(rows["square"].max()), n=len(rows))]
