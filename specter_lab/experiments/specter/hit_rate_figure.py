"""The figure of specter-hit-rate, from its rows alone."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specter_lab.experiments.specter import simulated

GB = (16, 24, 32)
JUDGED = "token-weighted"  # the definition that claims are judged on
DRAFT_COUNTED = "token-weighted, draft counted"
SLOTS_USED, PRECISION = "slots used", "prefetch precision"  # no hit rates
HIT_RATE = "simulated_hit_rate"
PAPER = {  # Specter [S]: system -> hit rate at 16, 24 and 32 GB, DeepSeek
    "lru": (0.292, 0.5094, 0.7656),
    "lru-s": (0.6113, 0.7656, 0.9577),
    "sp-e": (0.9604, 0.9544, 0.9198),
    "sp-l": (0.9633, 0.9546, 0.959),
    "specter": (0.9985, 0.9862, 0.9625),
}
FAMILY = "deepseek"


def definitions(rows: pd.DataFrame, model: str, system: str, budget: str) -> pd.DataFrame:
    """One system's rows at one budget, by definition."""
    kept = (rows["model"] == model) & (rows["system"] == system) & (rows["budget"] == budget)
    return rows[kept].set_index("definition")


def plot(rows: pd.DataFrame) -> Figure:
    """Left: every system by the judged definition. Right: Specter's paper mode by every definition, with ceilings."""
    model = simulated.model_of(rows, FAMILY) or rows["model"].iloc[0]
    of_model = rows[rows["model"] == model]
    budgets = of_model[["budget", "slots_per_layer"]].drop_duplicates().sort_values("slots_per_layer")
    colors = dict(zip(budgets["budget"], sns.color_palette("viridis_r", len(budgets) + 1)[1:]))
    systems = [*PAPER, *(s for s in dict.fromkeys(of_model["system"]) if s not in PAPER)]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12.5, 1.6 + 0.34 * max(len(systems), 9)), width_ratios=(1.15, 1), constrained_layout=True
    )
    _systems(left, of_model[of_model["definition"] == JUDGED], systems, colors)
    _definitions(right, of_model[of_model["system"] == "specter"], colors)
    left.set_title(f"a  Every system, {JUDGED} ({model})", loc="left", fontsize=10)
    right.set_title("b  Specter (paper mode): one run, many numbers", loc="left", fontsize=10)
    for axis in (left, right):
        axis.set(xlim=(-0.02, 1.02), xlabel="share (simulated)")
        axis.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.0f} %")
        axis.grid(alpha=0.25)
        axis.invert_yaxis()
    for budget, slots in budgets.itertuples(index=False):
        left.plot([], [], "o", color=colors[budget], label=f"{budget}: {slots} slots per layer")
    left.plot([], [], "*", color="0.3", mfc="white", markersize=11, label="the paper")
    right.plot(
        [], [], "|", color="0.3", markersize=13, markeredgewidth=2, label="most that any contents of the slots give"
    )
    handles = [pair for axis in (left, right) for pair in zip(*axis.get_legend_handles_labels())]
    figure.legend(*zip(*handles), loc="outside lower center", ncols=len(handles), fontsize=9)
    plt.close(figure)
    return figure


def _systems(axis: Axes, rows: pd.DataFrame, systems: list[str], colors: dict) -> None:
    titles = simulated.titles(rows)
    systems = [system for system in systems if system in titles]
    for place, system in enumerate(systems):
        for i, (budget, color) in enumerate(colors.items()):
            row = rows[(rows["system"] == system) & (rows["budget"] == budget)].iloc[0]
            _dot(axis, row, place + 0.13 * (i - 1), color)
            if f"{GB[-1]} GB" in colors and system in PAPER:
                axis.plot(PAPER[system][i], place + 0.13 * (i - 1), "*", color=color, mfc="white", markersize=11)
    axis.set_ylim(-0.6, len(systems) - 0.4)
    axis.set_yticks(range(len(systems)), [titles[system] for system in systems], fontsize=9)


def _definitions(axis: Axes, rows: pd.DataFrame, colors: dict) -> None:
    names = list(dict.fromkeys(rows["definition"]))
    for place, name in enumerate(names):
        for i, (budget, color) in enumerate(colors.items()):
            row = rows[(rows["definition"] == name) & (rows["budget"] == budget)].iloc[0]
            _dot(axis, row, place + 0.2 * (i - 1), color)
            if pd.notna(row["ceiling"]):
                axis.plot(row["ceiling"], place + 0.2 * (i - 1), "|", color=color, markersize=10, markeredgewidth=2)
    if f"{GB[-1]} GB" in colors:
        for value, color in zip(PAPER["specter"], colors.values()):
            axis.axvline(value, color=color, linestyle=":", linewidth=1.2)
        axis.annotate("the paper's Specter: 99.85, 98.62, 96.25 % ", (PAPER["specter"][-1], -0.55), fontsize=8, ha="right",
                      va="center")  # fmt: skip
    axis.axhspan(len(names) - 2.5, len(names) - 0.5, color="0.93", zorder=0)
    axis.set_ylim(-0.85, len(names) - 0.5)
    labels = [f"{name}\n(judged)" if name == JUDGED else f"{name}\n(not a hit rate)" if name in (SLOTS_USED, PRECISION) else name
              for name in names]  # fmt: skip
    axis.set_yticks(range(len(names)), labels, fontsize=9)


def _dot(axis: Axes, row: pd.Series, y: float, color: tuple) -> None:
    ends = np.abs(row[[f"{HIT_RATE}_ci_low", f"{HIT_RATE}_ci_high"]].to_numpy(float) - row[HIT_RATE])
    axis.errorbar(row[HIT_RATE], y, xerr=ends[:, None], fmt="o", color=color, markersize=5, capsize=2, linewidth=1)
