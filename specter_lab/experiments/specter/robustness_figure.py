"""The figure of specter-robustness, from its rows alone."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specter_lab.experiments.specter import panels
from specter_lab.plan.policies import find_policy

POLICIES = ("specter", "specter-fast")
LOOKAHEAD, TPOT, NATURAL = "lookahead", "tpot", "tpot, lookahead as it is"
RECALL, RECALL_DRAFTED = "recall", "recall, first K tokens"
CLAIMED = "deepseek"
PAPER_MS = {1.0: 63.0, 0.41: 84.2}  # [S]; the model is not known to us, 63.0 is nearest to DeepSeek's TPOT
PAPER_RECALL = (0.930, 0.961)  # [S]
TPOT_MS = "simulated_tpot_ms"
MARKERS = ("o", "s", "^", "v")  # of the definitions of recall and precision
NATURAL_AT = 1.06  # left of precision 1: the lookahead as it is, whose precision the first panel has


def curve(rows: pd.DataFrame, model: str, policy: str) -> pd.DataFrame:
    """TPOT by precision, diluted from a perfect lookahead."""
    kept = (rows["quantity"] == TPOT) & (rows["model"] == model) & (rows["policy"] == policy)
    return rows[kept].set_index("precision").sort_index(ascending=False)


def lookahead(rows: pd.DataFrame) -> pd.DataFrame:
    """Recall and precision as they are: rows by model and definition."""
    return rows[rows["quantity"] == LOOKAHEAD].set_index(["model", "definition"])


def plot(rows: pd.DataFrame) -> Figure:
    """a: recall and precision of the lookahead. Then per model: TPOT against precision, with the paper's two points."""
    models = list(dict.fromkeys(rows["model"]))
    figure, axes = plt.subplots(1, 1 + len(models), figsize=(2.6 + 2.1 * len(models), 4.1), constrained_layout=True)
    colors = dict(zip(POLICIES, sns.color_palette("colorblind", 2)))
    of_lookahead = _lookahead_panel(axes[0], rows, models)
    panels.title(axes[0], 0, "the lookahead (measured)")
    for place, (axis, model) in enumerate(zip(axes[1:], models), start=1):
        for policy, color in colors.items():
            _curve(axis, rows, model, policy, color)
        if rows.loc[rows["model"] == model, "family"].iloc[0] == CLAIMED:
            axis.plot(*zip(*PAPER_MS.items()), "k*:", markersize=10, linewidth=1)
        panels.title(axis, place, model)
        axis.set(xlim=(1.1, 0.37), ylim=(0, None))
        axis.set_xlabel("precision of the prefetch", fontsize=8)
        axis.grid(alpha=0.25)
    axes[1].set_ylabel("simulated TPOT, ms per token", fontsize=8)
    for axis in axes:
        axis.tick_params(labelsize=7.5)
    shown = [
        *(Line2D([], [], color=color, marker="o", markersize=4, label=find_policy(policy).title) for policy, color in colors.items()),
        Line2D([], [], color="0.3", alpha=0.3, linewidth=7, label="95 % interval over requests"),
        Line2D([], [], color="0.3", marker="D", mfc="white", linestyle="none", label="the lookahead as it is, not spoilt"),
        Line2D([], [], color="black", marker="*", markersize=10, linestyle=":", label="the paper (measured)"),
    ]  # fmt: skip
    figure.legend(handles=[*of_lookahead, *shown], loc="outside lower center", ncols=3, fontsize=7.5)
    plt.close(figure)
    return figure


def _curve(axis: Axes, rows: pd.DataFrame, model: str, policy: str, color: tuple) -> None:
    points = curve(rows, model, policy)
    axis.plot(points.index, points[TPOT_MS], color=color, marker="o", markersize=4)
    ends = (points[f"{TPOT_MS}_ci_low"], points[f"{TPOT_MS}_ci_high"])
    axis.fill_between(points.index, *ends, color=color, alpha=0.15, linewidth=0)
    kept = (rows["quantity"] == NATURAL) & (rows["model"] == model) & (rows["policy"] == policy)
    axis.plot(NATURAL_AT, rows.loc[kept, TPOT_MS].iloc[0], color=color, marker="D", markersize=5.5, mfc="white")


def _lookahead_panel(axis: Axes, rows: pd.DataFrame, models: list[str]) -> list:
    """Draws it; returns what its marks mean."""
    table, place = lookahead(rows), np.arange(len(models))
    handles = []
    for number, (name, marker) in enumerate(zip(dict.fromkeys(table.index.get_level_values("definition")), MARKERS)):
        found = table.loc[[(model, name) for model in models]]
        value = found["value"].to_numpy()
        ends = (value - found["value_ci_low"], found["value_ci_high"] - value)
        color = "black" if name == RECALL else "0.55"
        shift = 0.15 * (number - 1.5)
        handles.append(axis.errorbar(place + shift, value, ends, fmt=marker, color=color, markersize=4.5, label=name))
    handles.append(
        axis.axhspan(*PAPER_RECALL, color="gold", alpha=0.4, linewidth=0, zorder=0, label="the paper's recall")
    )
    axis.set_xticks(place, [model.replace("-", "-\n") for model in models])
    lowest = min(PAPER_RECALL[0], table["value_ci_low"].min())
    axis.set(xlim=(-0.5, len(models) - 0.5), ylim=(lowest - 0.01, 1.0))
    axis.set_ylabel("share of a round's distinct experts", fontsize=8)
    axis.grid(axis="y", alpha=0.25)
    return handles
