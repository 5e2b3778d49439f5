"""The figure of specter-io-hiding, from its rows alone."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from specter_lab.experiments.specter import panels, simulated

SYSTEMS = ("specter", "specter-fast", "specmoeoff", "sp-e", "sp-l")  # those that prefetch while they draft
PAPER = {"deepseek": 0.555, "qwen": 0.605, "phi": 0.224}  # Specter [S]: family -> share hidden
PAPER_PHI_MS = {"total": 2089.2, "exposed": 1621.3}
HIDDEN = "simulated_hidden_share"
PARTS = {  # of a round on the compute stream
    "simulated_draft_ms": "draft", "simulated_exposed_ms": "waiting for copies", "simulated_verify_ms": "verification",
}  # fmt: skip
_COLORS = sns.color_palette("colorblind", 6)
_BUDGETS = {"high": -0.045, "low": 0.045}  # how far aside
_PART_COLORS = dict(zip(PARTS, (_COLORS[0], _COLORS[3], _COLORS[2])))
_COPIES = "0.55"
_REPORTED = {"color": "black", "linestyle": ":", "linewidth": 1.3}


def plot(rows: pd.DataFrame) -> Figure:
    """a: hidden share by model, budget and system, with the paper's. Others: one round on both streams, per model."""
    models = list(dict.fromkeys(rows["model"]))
    systems, titles = [system for system in SYSTEMS if system in set(rows["system"])], simulated.titles(rows)
    figure = plt.figure(figsize=(2.2 + 1.8 * max(2, len(models)), 6.2), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1.1, 1))
    share = upper.subplots()
    _shares(share, rows, models, systems)
    panels.title(share, 0, "share of the copies' time that is hidden")
    upper.legend(handles=_of_shares(systems, titles), loc="outside right upper", fontsize=7.5)
    axes = lower.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for place, (axis, model) in enumerate(zip(axes, models), start=1):
        _round(axis, rows[(rows["model"] == model) & (rows["budget"] == "high")], systems)
        panels.title(axis, place, f"a round of {model}")
    axes[0].set_yticks(range(len(systems)), [titles[system] for system in systems], fontsize=7.5)
    axes[0].set_ylim(len(systems) - 0.45, -0.55)
    bars = [Patch(color=color, label=PARTS[part]) for part, color in _PART_COLORS.items()]
    bars += [
        Patch(color=_COPIES, label="copies on the link"),
        Line2D([], [], **_REPORTED, label="the paper: exposed, all copies"),
    ]
    lower.legend(handles=bars, loc="outside lower center", ncols=5, fontsize=7.5)
    plt.close(figure)
    return figure


def _of_shares(systems: list[str], titles: dict[str, str]) -> list[Line2D]:
    dot = {"marker": "o", "markersize": 5, "linestyle": "none"}
    return [
        *(Line2D([], [], color=color, label=titles[system], **dot) for system, color in zip(systems, _COLORS)),
        Line2D([], [], color="0.3", label="high budget", **dot),
        Line2D([], [], color="0.3", mfc="white", label="low budget", **dot),
        Line2D([], [], color="0.3", label="95 % interval"),
        Line2D([], [], **_REPORTED, label="the paper"),
    ]


def _shares(axis: Axes, rows: pd.DataFrame, models: list[str], systems: list[str]) -> None:
    found = rows.set_index(["model", "system", "budget"])
    for i, model in enumerate(models):
        for j, (system, color) in enumerate(zip(systems, _COLORS)):
            for budget, aside in _BUDGETS.items():
                row, x = found.loc[(model, system, budget)], i + 0.17 * (j - (len(systems) - 1) / 2) + aside
                axis.plot([x, x], [row[f"{HIDDEN}_ci_low"], row[f"{HIDDEN}_ci_high"]], color=color, linewidth=1.2)
                axis.plot(x, row[HIDDEN], "o", color=color, mfc=color if budget == "high" else "white", markersize=5)
        reported = PAPER.get(rows.loc[rows["model"] == model, "family"].iloc[0])
        if reported is not None:
            axis.plot([i - 0.44, i + 0.44], [reported] * 2, **_REPORTED)
            axis.annotate(f"{reported:.1%}", (i + 0.44, reported), fontsize=7, ha="right", va="bottom")
    axis.set_xticks(range(len(models)), models, fontsize=8)
    axis.set_ylim(bottom=min(0, rows[f"{HIDDEN}_ci_low"].min()) - 0.02)
    axis.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.0f} %")
    axis.set_ylabel("simulated", fontsize=8)
    axis.tick_params(axis="y", labelsize=7.5)
    axis.grid(alpha=0.25, axis="y")


def _round(axis: Axes, rows: pd.DataFrame, systems: list[str]) -> None:
    """One mean round per system: what compute does above, what the link does below."""
    rows = rows.set_index("system").reindex(systems)
    place, left = np.arange(len(rows)), 0
    for part, color in _PART_COLORS.items():
        axis.barh(place - 0.19, rows[part], left=left, height=0.36, color=color)
        left = left + rows[part]
    axis.barh(place + 0.19, rows["simulated_h2d_ms"], height=0.36, color=_COPIES)
    if rows["family"].iloc[0] == "phi":
        for ms in PAPER_PHI_MS.values():
            axis.axvline(ms, **_REPORTED)
    axis.set_xlabel("simulated ms, high budget", fontsize=8)
    axis.tick_params(axis="x", labelsize=7.5)
    axis.grid(alpha=0.25, axis="x")
