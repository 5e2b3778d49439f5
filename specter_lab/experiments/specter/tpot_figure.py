"""The figure of specter-tpot, from its rows alone."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from specter_lab.experiments.specter import panels, simulated
from specter_lab.experiments.specter.simulation_rows import DECODE, STEADY
from specter_lab.experiments.specter.simulation_rows import PAPER as PAPER_TPOT

ALL_SETS = "all"
TPOT = {definition: f"simulated_tpot_{definition}_ms" for definition in (PAPER_TPOT, STEADY, DECODE)}
# The paper's systems, fastest first, and what they are called here.
IN_ORDER = {
    "specter": "specter",
    "specmoeoff": "specmoeoff",
    "mo-sm": "lru-s",
    "vllm": "vllm",
    "transformers": "transformers",
}
NAMES = {
    "specter": "Specter",
    "specmoeoff": "SpecMoEOff",
    "mo-sm": "MO-SM",
    "vllm": "vLLM",
    "transformers": "Transformers",
}
PAPER = {  # Specter [S]: family -> system -> ms per token at the high budget
    "qwen": {"specter": 35.3, "specmoeoff": 66.4, "mo-sm": 74.2, "vllm": 176.6, "transformers": 258.2},
    "phi": {"specter": 163.3, "specmoeoff": 292.1, "mo-sm": 295.1, "vllm": 297.5, "transformers": 960.6},
    "deepseek": {"specter": 72.2, "transformers": 344.9},
}  # fmt: skip
_BLUE, _ORANGE = sns.color_palette("colorblind", 2)
BUDGETS = {"high": (_BLUE, -0.21), "low": (_ORANGE, 0.21)}  # colour, and how far below its system's line
MARKS = {  # definition of TPOT -> how it is drawn; the tick is in front of the dot and taller, so that neither hides the other
    PAPER_TPOT: {"marker": "o", "markersize": 4.5, "zorder": 3},
    STEADY: {"marker": "|", "markersize": 9, "markeredgewidth": 1.2, "zorder": 5},
    DECODE: {"marker": "D", "markersize": 5.5, "mfc": "none", "zorder": 4},
}
LABELS = {PAPER_TPOT: "the paper's formula", STEADY: "steady", DECODE: "decode"}
ONE_SET = {"marker": ".", "markersize": 3, "alpha": 0.55, "linestyle": "none"}
REPORTED = {"marker": "*", "color": "black", "mfc": "white", "markersize": 9, "linestyle": "none", "zorder": 6}


def by_cell(rows: pd.DataFrame, definition: str = "paper") -> pd.DataFrame:
    """TPOT in ms of every cell (model, budget, prompt set) by system."""
    cells = rows[rows["prompt_set"] != ALL_SETS]
    return cells.pivot(index=["model", "budget", "prompt_set"], columns="system", values=TPOT[definition])


def plot(rows: pd.DataFrame) -> Figure:
    """One panel per model: every system's TPOT by three definitions, at both budgets, and every prompt set's."""
    models = list(dict.fromkeys(rows["model"]))
    titles = simulated.titles(rows)
    systems = [*(s for s in IN_ORDER.values() if s in titles), *(s for s in titles if s not in IN_ORDER.values())]
    size = (1.8 + 1.9 * len(models), 1.3 + 0.31 * len(systems))
    figure, axes = plt.subplots(1, len(models), figsize=size, sharey=True, squeeze=False, constrained_layout=True)
    for place, (axis, model) in enumerate(zip(axes[0], models)):
        _panel(axis, rows[rows["model"] == model], systems)
        panels.title(axis, place, model)
        axis.set_xlabel("simulated ms per token", fontsize=8)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.tick_params(axis="x", labelsize=7.5)
        axis.axhline(sum(system in IN_ORDER.values() for system in systems) - 0.5, color="0.5", linewidth=0.8)
        axis.grid(alpha=0.25)
    axes[0, 0].set_yticks(range(len(systems)), [titles[system] for system in systems], fontsize=7.5)
    axes[0, 0].set_ylim(len(systems) - 0.4, -0.6)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=4, fontsize=7.5)
    plt.close(figure)
    return figure


def _legend() -> list[Line2D]:
    budgets = [
        Line2D([], [], color=color, linewidth=4, label=f"{budget} budget") for budget, (color, _) in BUDGETS.items()
    ]
    marks = [Line2D([], [], color="0.25", linestyle="none", label=LABELS[name], **how) for name, how in MARKS.items()]
    one_set = Line2D([], [], color="0.25", label="one prompt set, the paper's formula", **ONE_SET)
    return [*budgets, *marks, one_set, Line2D([], [], label="the paper, high budget", **REPORTED)]


def _panel(axis: Axes, rows: pd.DataFrame, systems: list[str]) -> None:
    reported = PAPER.get(rows["family"].iloc[0], {})
    of_claim = {system: name for name, system in IN_ORDER.items()}
    for budget, (color, shift) in BUDGETS.items():
        part = rows[rows["budget"] == budget].set_index("system")
        for place, system in enumerate(systems):
            if system not in part.index:
                continue  # a draft that this architecture cannot have
            own = part.loc[[system]].set_index("prompt_set")
            sets, pooled = own.drop(index=ALL_SETS)[TPOT[PAPER_TPOT]], own.loc[ALL_SETS]
            axis.plot(sets, np.full(len(sets), place + shift), color=color, **ONE_SET)
            for definition, how in MARKS.items():
                axis.plot(pooled[TPOT[definition]], place + shift, color=_darker(color, definition), **how)
            value = reported.get(of_claim.get(system))
            if value is not None and budget == "high":
                axis.plot(value, place + shift, **REPORTED)


def _darker(color: tuple, definition: str) -> tuple:
    """The tick has to be seen on the dot."""
    return tuple(0.45 * part for part in color) if definition == STEADY else color
