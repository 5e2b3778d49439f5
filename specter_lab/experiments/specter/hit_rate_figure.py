"""The figure of specter-hit-rate, from its rows alone."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from specter_lab.experiments.specter import panels, simulated

GB = (16, 24, 32)
JUDGED = "token-weighted"  # the definition that claims are judged on
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
TICKS = (0, 0.5, 0.8, 0.9, 0.95, 1)
LEAST_MISSES = 0.05  # the axis is logarithmic in this + the share of misses, so that 95 and 100 % lie apart
_BLUE, _ORANGE = sns.color_palette("colorblind", 2)
_MARKS = [
    Line2D([], [], marker="o", color=_BLUE, markersize=4, linewidth=1, label="ours, simulated, with 95 % interval"),
    Line2D([], [], marker="|", color=_ORANGE, markersize=9, markeredgewidth=2, linestyle="none",
           label="ceiling: no policy of its kind can exceed it (measured)"),
    Line2D([], [], marker="*", color="black", mfc="white", markersize=9, linestyle="none", label="the paper"),
    Line2D([], [], color="black", linestyle=":", linewidth=1, label="the paper's Specter"),
]  # fmt: skip


def definitions(rows: pd.DataFrame, model: str, system: str, budget: str) -> pd.DataFrame:
    """One system's rows at one budget, by definition."""
    kept = (rows["model"] == model) & (rows["system"] == system) & (rows["budget"] == budget)
    return rows[kept].set_index("definition")


def plot(rows: pd.DataFrame) -> Figure:
    """A column per budget. Top: every system by the judged definition. Bottom: Specter's paper mode by every definition."""
    model = simulated.model_of(rows, FAMILY) or rows["model"].iloc[0]
    of_model = rows[rows["model"] == model]
    budgets = of_model[["budget", "slots_per_layer"]].drop_duplicates().sort_values("slots_per_layer")
    judged, specter = of_model[of_model["definition"] == JUDGED], of_model[of_model["system"] == "specter"]
    titles = simulated.titles(judged)
    systems = [*(s for s in PAPER if s in titles), *(s for s in titles if s not in PAPER)]
    names = list(dict.fromkeys(specter["definition"]))
    heights = (len(systems) + 1, len(names) + 1)
    figure, axes = plt.subplots(
        2, len(budgets), figsize=(1.9 + 1.9 * len(budgets), 1.9 + 0.2 * sum(heights)), sharex=True, sharey="row",
        squeeze=False, height_ratios=heights, constrained_layout=True,
    )  # fmt: skip
    for column, (budget, slots) in enumerate(budgets.itertuples(index=False)):
        upper, lower = axes[:, column]
        place = GB.index(int(budget.split()[0])) if budget.endswith(" GB") else None
        reported = {} if place is None else {system: shares[place] for system, shares in PAPER.items()}
        _rows(upper, judged[judged["budget"] == budget].set_index("system"), systems, reported)
        _rows(lower, specter[specter["budget"] == budget].set_index("definition"), names, {})
        if place is not None:
            lower.axvline(_position(PAPER["specter"][place]), color="black", linestyle=":", linewidth=1)
        panels.title(upper, column, f"{budget}: {slots} slots/layer")
        panels.title(lower, len(budgets) + column, "Specter, all definitions")
        lower.axhspan(len(names) - 2.5, len(names) - 0.5, color="0.93", zorder=0, linewidth=0)
        lower.set_xlabel("share of accesses", fontsize=8)
    axes[0, 0].set_yticks(range(len(systems)), [titles[system] for system in systems], fontsize=7.5)
    axes[1, 0].set_yticks(range(len(names)), [_label(name) for name in names], fontsize=7.5)
    for row, count in zip(axes, (len(systems), len(names))):
        row[0].set_ylim(count - 0.4, -0.6)
    axes[0, 0].set_xlim(_position(-0.12), _position(1) + 0.05)
    axes[0, 0].xaxis.set_major_locator(FixedLocator([_position(share) for share in TICKS]))
    axes[0, 0].set_xticklabels([f"{share:.0%}".rstrip("%") for share in TICKS[:-1]] + ["100 %"])
    for axis in axes.flat:
        axis.tick_params(axis="x", labelsize=7)
        axis.grid(alpha=0.25)
    figure.suptitle(f"{model}; top: every system, {JUDGED}; bottom: one run of Specter by every definition", fontsize=9)
    figure.legend(handles=_MARKS, loc="outside lower center", ncols=2, fontsize=7.5)
    plt.close(figure)
    return figure


def _position(share: float) -> float:
    """Where a share lies on the axis; 100 % is at its end."""
    return float(-np.log10(1 + LEAST_MISSES - share))


def _label(name: str) -> str:
    if name == JUDGED:
        return f"{name} (judged)"
    return f"{name} (no hit rate)" if name in (SLOTS_USED, PRECISION) else name


def _rows(axis: Axes, found: pd.DataFrame, names: list[str], reported: dict[str, float]) -> None:
    """A row per name: our share with its interval, its ceiling, the paper's."""
    for place, name in enumerate(names):
        row = found.loc[name] if name in found.index else None
        if row is None:
            continue
        low, value, high = (
            _position(row[column]) for column in (f"{HIT_RATE}_ci_low", HIT_RATE, f"{HIT_RATE}_ci_high")
        )
        if pd.notna(row["ceiling"]):
            axis.plot(_position(row["ceiling"]), place, "|", color=_ORANGE, markersize=9, markeredgewidth=2, zorder=2)
        axis.plot([low, high], [place, place], color=_BLUE, linewidth=1.5, zorder=3)
        axis.plot(value, place, "o", color=_BLUE, markersize=4, zorder=4)
        if name in reported:
            axis.plot(_position(reported[name]), place, "*", color="black", mfc="white", markersize=9, zorder=5)
