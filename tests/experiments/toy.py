"""A complete experiment of a few lines: what the tests run where a real one would take minutes."""

import os
import time
from collections import Counter
from pathlib import Path

import pandas as pd

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.experiments import jobs, registry
from specter_lab.experiments.context import Context, Measured

TOY = registry.Experiment("toy-squares", "squares", "none", "none", "tests.experiments.toy", {"cpu": 1}, ("squares",))
CLAIMS = """
[toy-squares.largest]
text = "the largest square"
kind = "threshold"
at_least = 9.0
unit = "x"
source = "C"
"""


def register(folder: Path) -> None:
    """Make the toy known in this process; its claims file is written into `folder`."""
    registry.EXPERIMENTS[TOY.id] = TOY
    paths.CLAIMS = folder / "claims.toml"
    paths.CLAIMS.write_text(CLAIMS)


def started(log: Path) -> Counter:
    """How often each row was started, from its log."""
    return Counter(line.split()[0] for line in log.read_text().splitlines()) if log.exists() else Counter()


def square(number: int, seed: int, sleep_s: float, log: str, fail: str) -> list[dict]:
    """One row. Every call adds a line `number pid` to `log` when it starts."""
    with open(log, "a") as file:
        file.write(f"{number} {os.getpid()}\n")
    time.sleep(sleep_s)
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
