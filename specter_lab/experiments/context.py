"""What an experiment is given and what it hands back.

An experiment is a module that defines four functions:

    inputs(context) -> dict[str, str]             every model and file it reads, name -> sha256
    run(context) -> pandas.DataFrame              tidy rows; long work goes through experiments.jobs.run
    plot(rows) -> matplotlib.figure.Figure        the figure, from rows alone
    claims(rows) -> list[Measured]                what the rows say about the paper's claims (artifacts/claims.toml)

and, where other programs want the rows in a form of their own,

    files(rows) -> dict[str, bytes]               small files beside the rows, name -> content
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.experiments.registry import DEFAULT_MODELS, EXPERIMENTS

if TYPE_CHECKING:
    from specter_lab.experiments.local_processes import SharedProcesses

SEEDS = range(2**32)  # what every generator in use takes


@dataclass(frozen=True)
class Context:
    """One question: which experiment, on which tier, with which models and seed."""

    experiment: str  # id
    tier: str
    seed: int
    models: tuple[str, ...]  # zoo names, folders or hub ids
    fresh: bool  # compute the rows again even if the cache has them; quantised models are kept
    runner: str = "local"  # where rows are computed (experiments/jobs.py); changes no value
    shared: SharedProcesses | None = (
        None  # processes that several experiments share; None: the local runner starts its own
    )

    @property
    def folder_name(self) -> str:
        """Name of the results folder: the tier, or `<tier>-own` when the user chose the models."""
        return self.tier if self.models == DEFAULT_MODELS[self.tier] else f"{self.tier}-own"


@dataclass(frozen=True)
class Measured:
    """What a run found out about one claim."""

    id: str  # <experiment id>/<short name>, as in artifacts/claims.toml
    value: float | None  # in the claim's unit; None: not measured, and `note` says why
    low: float | None = None  # confidence interval
    high: float | None = None
    n: int | None = None  # observations behind the value
    simulated: bool = False  # from the cost model, not from a clock or a counter
    note: str = ""  # why it is so, or why there is none
    aside: str = ""  # what nobody should read the value without: the pairs of an ordering that fail

    def __post_init__(self) -> None:
        bad = [x for x in (self.value, self.low, self.high) if x is not None and not math.isfinite(x)]
        if bad:
            raise ValueError(f"{self.id}: {bad[0]} is not a measurement; give value=None and a note instead")


def check_seed(seed: int) -> None:
    """Raise UserError for a seed that some random generator would refuse."""
    if not isinstance(seed, int) or seed not in SEEDS:
        raise UserError(f"a seed of {seed} is not used here: give a whole number from 0 to {SEEDS[-1]}")


def reads_nothing(context: Context) -> dict[str, str]:
    """The `inputs` of an experiment whose weights are random."""
    return {}


def need_gpu(context: Context) -> None:
    """Raise UserError where there is no CUDA GPU."""
    import torch

    if torch.cuda.is_available():
        return
    if "cpu" in EXPERIMENTS[context.experiment].tiers:
        way_out = "its cpu tier (without TIER=gpu, or --tier) runs on any machine"
    elif (paths.RECORDED / context.experiment / "gpu").is_dir():
        way_out = "its notebook shows what was recorded on one"
    else:
        way_out = "run it on a machine that has one"
    raise UserError(f"{context.experiment} measures a CUDA GPU and there is none: {way_out}")
