"""The figure of specter-tpot, from its rows alone."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from specter_lab.experiments.specter import simulated
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
PAPER = {  # Specter [S]: family -> system -> ms per token at the high budget
    "qwen": {"specter": 35.3, "specmoeoff": 66.4, "mo-sm": 74.2, "vllm": 176.6, "transformers": 258.2},
    "phi": {"specter": 163.3, "specmoeoff": 292.1, "mo-sm": 295.1, "vllm": 297.5, "transformers": 960.6},
    "deepseek": {"specter": 72.2, "transformers": 344.9},
}  # fmt: skip
MARKERS = {"paper": "o", "steady": "|", "decode": "d"}  # definition of TPOT -> marker


def by_cell(rows: pd.DataFrame, definition: str = "paper") -> pd.DataFrame:
    """TPOT in ms of every cell (model, budget, prompt set) by system."""
    cells = rows[rows["prompt_set"] != ALL_SETS]
    return cells.pivot(index=["model", "budget", "prompt_set"], columns="system", values=TPOT[definition])


def plot(rows: pd.DataFrame) -> Figure:
    """One panel per model: every system's TPOT by three definitions, at both budgets, and every prompt set's."""
    models = list(dict.fromkeys(rows["model"]))
    titles = simulated.titles(rows)
    systems = [*(s for s in IN_ORDER.values() if s in titles), *(s for s in titles if s not in IN_ORDER.values())]
    size = (3.0 + 3.6 * len(models), 1.6 + 0.36 * len(systems))
    figure, axes = plt.subplots(1, len(models), figsize=size, sharey=True, squeeze=False, constrained_layout=True)
    for axis, model in zip(axes[0], models):
        _panel(axis, rows[rows["model"] == model], systems)
        axis.set(title=model, xlabel="simulated TPOT, ms per token", xscale="log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.axhline(sum(system in IN_ORDER.values() for system in systems) - 0.5, color="0.5", linewidth=0.8)
        axis.grid(alpha=0.25)
    axes[0, 0].set_yticks(range(len(systems)), [titles[system] for system in systems], fontsize=9)
    axes[0, 0].set_ylim(len(systems) - 0.4, -0.6)
    handles = {label: mark for axis in axes[0] for mark, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    plt.close(figure)
    return figure


def _panel(axis: Axes, rows: pd.DataFrame, systems: list[str]) -> None:
    blue, orange = sns.color_palette("colorblind", 2)
    reported = PAPER.get(rows["family"].iloc[0], {})
    of_claim = {system: name for name, system in IN_ORDER.items()}
    for budget, color, shift in (("high", blue, -0.15), ("low", orange, 0.15)):
        part = rows[rows["budget"] == budget].set_index("system")
        for place, system in enumerate(systems):
            if system not in part.index:
                continue  # a draft that this architecture cannot have
            own = part.loc[[system]].set_index("prompt_set")
            sets, pooled = own.drop(index=ALL_SETS)[TPOT["paper"]], own.loc[ALL_SETS]
            label = f"{budget} budget" if place == 0 else None
            axis.plot(sets, np.full(len(sets), place + shift), "o", color=color, alpha=0.3, markersize=3, linewidth=0)
            for definition, marker in MARKERS.items():
                named = label and (label if definition == "paper" else f"{label}, {definition}")
                axis.plot(pooled[TPOT[definition]], place + shift, marker, color=color, markersize=6 if marker == "o" else 7,
                          mfc=color if marker == "o" else "white", linestyle="none", label=named, zorder=4 - len(marker))  # fmt: skip
            value = reported.get(of_claim.get(system))
            if value is not None and budget == "high":
                axis.plot(value, place + shift, "*", color="black", mfc="white", markersize=12, linestyle="none", zorder=5,
                          label="the paper's, high budget" if place == 0 else None)  # fmt: skip
