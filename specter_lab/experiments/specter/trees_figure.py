"""The figure of specter-trees: what trees commit per round, and what a token takes, both over the chain's."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specter_lab.experiments.specter import panels

CHAIN, TOKENS, RATIO = "chain", "tokens_per_round", "simulated_over_chain"
FILLED = {"low": True, "high": False}


def plot(rows: pd.DataFrame) -> Figure:
    """A column per decoding; above measured tokens per round, below simulated time with its 95 % interval over requests."""
    decodings, models = (list(dict.fromkeys(rows[name])) for name in ("decoding", "model"))
    items = [item for item in dict.fromkeys(rows["item"]) if item != CHAIN]
    colors = dict(zip(models, sns.color_palette("colorblind", len(models))))
    figure, axes = plt.subplots(
        2, len(decodings), figsize=(7.6, 1.6 + 0.72 * len(items)), sharey=True, squeeze=False, constrained_layout=True
    )
    for column, decoding in enumerate(decodings):
        cells = rows[rows["decoding"] == decoding].set_index(["model", "budget", "item"])
        for model in models:
            of_model = cells.loc[model]
            _tokens(axes[0, column], of_model.loc["low"], items, _shift(models, model), colors[model])
            for budget in FILLED:
                _times(axes[1, column], of_model.loc[budget], items, _shift(models, model), budget, colors[model])
        for row, (axis, label) in enumerate(
            zip(
                axes[:, column], ("tokens per round over the chain's, measured", "ms/token over the chain's, simulated")
            )
        ):
            axis.axvline(1, color="0.4", linewidth=0.8)
            axis.set_xscale("log")
            ticks = [0.4, 0.6, 0.8, 1] if row == 0 else [0.9, 1, 1.5, 2]
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
            axis.set_xlabel(label, fontsize=9)
            axis.grid(axis="x", alpha=0.25)
            panels.title(axis, row * len(decodings) + column, decoding)
    for row in axes:
        low, high = min(axis.get_xlim()[0] for axis in row), max(axis.get_xlim()[1] for axis in row)
        for axis in row:
            axis.set_xlim(low, high)
        row[0].set_yticks(range(len(items)), items, fontsize=8.5)
    axes[0, 0].invert_yaxis()
    marks = [
        Line2D([], [], color=color, marker="o", linestyle="", markersize=4, label=model)
        for model, color in colors.items()
    ]
    marks += [
        Line2D([], [], color="0.3", marker="o", linestyle="", markersize=4, label=f"{budget} budget",
               markerfacecolor="0.3" if filled else "white")
        for budget, filled in FILLED.items()
    ]  # fmt: skip
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), fontsize=8)
    plt.close(figure)
    return figure


def _shift(models: list[str], model: str) -> float:
    return (models.index(model) - (len(models) - 1) / 2) * 0.26


def _tokens(axis: Axes, cells: pd.DataFrame, items: list[str], shift: float, color) -> None:
    over_chain = cells.loc[items, TOKENS] / cells.loc[CHAIN, TOKENS]
    axis.plot(over_chain, np.arange(len(items)) + shift, "o", markersize=4, color=color)


def _times(axis: Axes, cells: pd.DataFrame, items: list[str], shift: float, budget: str, color) -> None:
    value, low, high = (cells.loc[items, name] for name in (RATIO, f"{RATIO}_ci_low", f"{RATIO}_ci_high"))
    at = np.arange(len(items)) + shift + (0.06 if FILLED[budget] else -0.06)
    axis.errorbar(value, at, xerr=(value - low, high - value), fmt="o", markersize=3.5, capsize=1.5, elinewidth=0.7, color=color,
                  markerfacecolor=color if FILLED[budget] else "white")  # fmt: skip
