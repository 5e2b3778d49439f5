"""specter-calibration: how far the simulator's numbers are from the paper's, as it is and with three numbers fitted.

Every number of the paper that the simulator can give is a cell: TPOT, throughput, hit rates, hidden shares. Three numbers,
the same for all cells, may be fitted: the host's launch time per operator, and the shares of the link's bandwidth that
demanded and prefetched copies reach. They are fitted on every other cell of each experiment (the first, third, ... in the
order of the table), by a coordinate search over the mean of |log(ours / paper)|, each at most log 4; the error is
reported on the others. Cells that share a simulation may fall into both halves.

Transformers and vLLM are the same systems as in specter-tpot and specter-batch (`layer_systems`). What the medians would be if
Transformers copied from pinned memory stands beside them, with the same three numbers.

Routing is measured on zoo models, not the paper's: an error may be the traffic's and not the clock's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np
import pandas as pd

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import offload, routing
from specter_lab.experiments.specter.calibration_cells import (
    HIT_RATE,
    TPOT,
    Cell,
    Fitted,
    cells,
    fitted_half,
    read_off,
    run_setup,
)
from specter_lab.experiments.specter.calibration_figure import plot
from specter_lab.experiments.specter.layer_systems import PINNED, TRANSFORMERS
from specter_lab.plan.hardware import read_profile

__all__ = ["claims", "inputs", "plot", "run"]

inputs = routing.inputs_of

FIT_REQUESTS_PER_SET = 2  # while fitting; the table has all
LIMITS = {
    "launch_us": (1.0, 100.0),
    "demand_share": (0.1, 1.25),
    "prefetch_share": (0.1, 1.25),
}  # 1.25: 31.5 of 25.1 GB/s
FIRST_STEP, LAST_STEP = 2.0, 1.05  # factors of the search
LARGEST_MISS = math.log(4)  # so that one impossible cell does not rule the fit
CELL, CONSTANT, FACTOR = "cell", "fitted constant", "factor"
IF_PINNED = "cell, if Transformers copied from pinned memory"
RESAMPLES = 2000
DIGITS = 5


def run(context: Context) -> pd.DataFrame:
    """Tidy rows: every cell before and after the fit, the fitted numbers, factors between two of the paper's times."""
    digests = [routing.inputs_digest(model) for model in context.models]
    arguments = {"models": list(context.models), "digests": digests, "seed": context.seed}
    return pd.DataFrame(jobs.run(context, [jobs.Job("calibration", measure_all, arguments)]))


def measure_all(models: Sequence[str], digests: Sequence[str], seed: int) -> jobs.Rows:
    """All rows. `digests` are here to name what is read in the cache key."""
    traffic = {
        routing.family(model): offload.traffic(model, seed) for model in reversed(models)
    }  # the first of a family
    listed = cells()
    halves = fitted_half(listed)
    profile = read_profile()
    as_it_is = Fitted(profile.launch_us, 1.0, 1.0)

    def values(chosen: Sequence[Cell], fitted: Fitted, per_set: int | None) -> list[float | None]:
        """The cells' numbers; None where the model is not there."""
        simulations = {
            setup: run_setup(setup, traffic[setup.family], profile, fitted, seed, per_set)
            for setup in dict.fromkeys(cell.setup for cell in chosen if cell.setup.family in traffic)
        }
        return [read_off(cell, simulations[cell.setup]) if cell.setup in simulations else None for cell in chosen]

    to_fit = [cell for cell, is_fitted in zip(listed, halves) if is_fitted and cell.setup.family in traffic]
    papers = np.array([cell.paper for cell in to_fit])
    fitted, tried = search(
        lambda guess: misfit(np.array(values(to_fit, guess, FIT_REQUESTS_PER_SET)), papers), as_it_is
    )
    before, after = values(listed, as_it_is, None), values(listed, fitted, None)
    rows = _cell_rows(CELL, listed, halves, before, after)
    places = [place for place, cell in enumerate(listed) if cell.setup.system == TRANSFORMERS]
    pinned = [replace(listed[place], setup=replace(listed[place].setup, system=PINNED)) for place in places]
    others = (values(pinned, guess, None) for guess in (as_it_is, fitted))
    rows += _cell_rows(IF_PINNED, pinned, [halves[place] for place in places], *others)
    rows += [
        {
            "row": CONSTANT,
            "name": name,
            "uncalibrated": asdict(as_it_is)[name],
            "calibrated": round(value, DIGITS),
            "n_tried": tried,
        }
        for name, value in asdict(fitted).items()
    ]
    return rows + factor_rows(listed, before, after)


def _cell_rows(
    row: str,
    listed: Sequence[Cell],
    halves: Sequence[bool],
    before: Sequence[float | None],
    after: Sequence[float | None],
) -> jobs.Rows:
    return [
        {"row": row, "experiment": cell.experiment, "name": cell.name, "quantity": cell.quantity, "paper": cell.paper,
         "half": "fitted" if is_fitted else "held out"} | _columns(cell, uncalibrated, calibrated)
        for cell, is_fitted, uncalibrated, calibrated in zip(listed, halves, before, after)
    ]  # fmt: skip


def _columns(cell: Cell, before: float | None, after: float | None) -> dict[str, float | None]:
    if before is None:
        return {}
    numbers = {"simulated_uncalibrated": before, "simulated_calibrated": after,
               "error_uncalibrated": before / cell.paper - 1, "error_calibrated": after / cell.paper - 1}  # fmt: skip
    return {name: round(float(value), DIGITS) for name, value in numbers.items()}


def misfit(ours: np.ndarray, papers: np.ndarray) -> float:
    """Mean of |log(ours / paper)|, each at most LARGEST_MISS."""
    return float(np.minimum(np.abs(np.log(np.maximum(ours, 1e-9) / papers)), LARGEST_MISS).mean())


def search(loss: Callable[[Fitted], float], start: Fitted) -> tuple[Fitted, int]:
    """Coordinate search: one number times or over the step, as long as that helps; then a smaller step.

    Returns:
        The best found, and how many were tried.
    """
    tried: dict[Fitted, float] = {start: loss(start)}
    best, step = start, FIRST_STEP
    while step > LAST_STEP:
        improved = False
        for name, (low, high) in LIMITS.items():
            for factor in (step, 1 / step):
                value = round(min(high, max(low, getattr(best, name) * factor)), DIGITS)
                guess = Fitted(**{**asdict(best), name: value})
                if guess not in tried:
                    tried[guess] = loss(guess)
                if tried[guess] < tried[best]:
                    best, improved = guess, True
                    break
        if not improved:
            step = math.sqrt(step)
    return best, len(tried)


def factor_rows(listed: Sequence[Cell], before: Sequence[float | None], after: Sequence[float | None]) -> jobs.Rows:
    """Every time over the first one of its experiment and model, the paper's and ours: what a speed-up claim is about."""
    rows, references = [], {}
    for cell, uncalibrated, calibrated in zip(listed, before, after):
        if cell.quantity != TPOT or uncalibrated is None:
            continue
        group = (cell.experiment, cell.setup.family, cell.setup.batch)
        if group not in references:
            references[group] = (cell, uncalibrated, calibrated)
            continue
        first, first_before, first_after = references[group]
        factors = {"paper": cell.paper / first.paper, "simulated_uncalibrated": uncalibrated / first_before,
                   "simulated_calibrated": calibrated / first_after}  # fmt: skip
        row = {
            "row": FACTOR,
            "experiment": cell.experiment,
            "name": f"{cell.name} over {first.name}",
            "quantity": "factor",
        }
        rows.append(row | {name: round(float(value), DIGITS) for name, value in factors.items()})
    return rows


def errors(
    rows: pd.DataFrame, half: str | None, column: str = "error_calibrated", *, pinned: bool = False
) -> np.ndarray:
    """Absolute relative errors of the simulated cells of one half, or of all.

    Args:
        pinned: Transformers' cells as they would be with pinned memory.
    """
    mine = rows[rows["row"].isin([CELL, IF_PINNED] if pinned else [CELL]) & rows["simulated_uncalibrated"].notna()]
    mine = mine.drop_duplicates(["experiment", "name", "quantity"], keep="last")  # the pinned ones come last
    return (mine if half is None else mine[mine["half"] == half])[column].abs().to_numpy()


def _median(values: np.ndarray) -> tuple[float, float, float]:
    """The median and its bootstrap interval over cells."""
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(np.median(values)), float(low), float(high)


def constants(rows: pd.DataFrame) -> Mapping[str, float]:
    """The fitted numbers by name."""
    return rows[rows["row"] == CONSTANT].set_index("name")["calibrated"].to_dict()


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Median relative errors, before the fit and on the half that was held out; the side of 1 of every factor."""
    prefix, held_out = "specter-calibration/", errors(rows, "held out")
    not_fitted = errors(rows, "held out", "error_uncalibrated")
    everything = errors(rows, None, "error_uncalibrated")
    fitted, timed = np.median(errors(rows, "fitted")), errors(rows[rows["quantity"] != HIT_RATE], "held out")
    factors = rows[rows["row"] == FACTOR]
    same_side = {
        name: float(((factors["paper"] - 1) * (factors[f"simulated_{name}"] - 1) > 0).mean())
        for name in ("uncalibrated", "calibrated")
    }
    pinned = {
        column: np.median(errors(rows, half, column, pinned=True))
        for half, column in (("held out", "error_calibrated"), (None, "error_uncalibrated"))
    }
    beside = {column: f"with Transformers in pinned memory {median:.0%}" for column, median in pinned.items()}
    return [
        Measured(f"{prefix}held-out-error", *_median(held_out), n=len(held_out), simulated=True,
                 note=f"median on the fitted cells {fitted:.0%}; held-out cells but hit rates {np.median(timed):.0%}; "
                      f"{beside['error_calibrated']}"),
        Measured(f"{prefix}uncalibrated-error", *_median(everything), n=len(everything), simulated=True,
                 note=beside["error_uncalibrated"]),
        Measured(f"{prefix}factors", same_side["uncalibrated"], n=len(factors), simulated=True,
                 note=f"after the fit {same_side['calibrated']:.0%}"),
        Measured(f"{prefix}fit-generalises", float(np.median(held_out) / np.median(not_fitted)), n=len(held_out), simulated=True,
                 note=f"held out: {np.median(not_fitted):.0%} before, {np.median(held_out):.0%} after"),
    ]  # fmt: skip


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """All cells, as the notebook shows them."""
    shown = ["experiment", "name", "quantity", "half", "paper", "simulated_uncalibrated", "error_uncalibrated",
             "simulated_calibrated", "error_calibrated"]  # fmt: skip
    return rows.loc[rows["row"] == CELL, shown].reset_index(drop=True)
