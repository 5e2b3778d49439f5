"""The figure of specter-engine, from its rows alone."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from specter_lab.experiments.specter.engine_runs import ALL_SETS, SYSTEMS
from specter_lab.experiments.specter.engine_tables import CLOSE, limits, medians


def plot(rows: pd.DataFrame) -> Figure:
    """a: ms per token of every system beside what limits it, per model; b: simulated against measured."""
    rows = rows[rows["by"] == "system"]
    models = list(dict.fromkeys(rows["model"]))
    figure, axes = plt.subplots(1, len(models) + 1, figsize=(6.4 + 3.2 * len(models), 4.6), constrained_layout=True)
    table, systems = limits(rows), [name for name in SYSTEMS if name in set(rows["item"])]
    for axis, model, letter in zip(axes, models, "abcdef"):
        _systems(axis, systems, rows[rows["model"] == model], table[table["model"] == model])
        axis.tick_params(labelleft=axis is axes[0])  # the same systems in every panel
        axis.set_title(f"{letter}  {rows.loc[rows['model'] == model, 'original'].iloc[0]}", loc="left", fontsize=10)
    _simulator(axes[-1], table)
    axes[-1].set_title(f"{'abcdef'[len(models)]}  Simulator", loc="left", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    plt.close(figure)
    return figure


def _systems(axis: Axes, systems: list[str], rows: pd.DataFrame, table: pd.DataFrame) -> None:
    """A row per system: prompt sets as small dots, all together as a large one, and the limit as a bar."""
    blue, orange = sns.color_palette("colorblind", 2)
    for budget, color, shift in (("high", blue, -0.16), ("low", orange, 0.16)):
        ms = medians(rows, "measured_ms_per_token").xs(budget, level="budget").droplevel("model")
        for place, name in enumerate(systems):
            if name not in ms or ms[name].isna().all():
                continue
            sets, pooled = ms[name].drop(index=ALL_SETS), ms.loc[ALL_SETS, name]
            first = place == 1
            axis.plot(sets, np.full(len(sets), place + shift), "o", color=color, alpha=0.35, markersize=3,
                      label=f"{budget} budget, one prompt set" if first else None)  # fmt: skip
            axis.plot(
                pooled, place + shift, "o", color=color, markersize=7, label=f"{budget} budget, all" if first else None
            )
            limit = table[(table["item"] == name) & (table["budget"] == budget)]
            if len(limit):
                floor = float(limit[["link_ms", "compute_ms"]].max(axis=1).iloc[0])
                axis.plot([floor, floor], [place + shift - 0.14, place + shift + 0.14], color=color, linewidth=2,
                          label=f"{budget} budget, its floor" if first else None)  # fmt: skip
    axis.set_yticks(range(len(systems)), systems, fontsize=8)
    axis.set_ylim(len(systems) - 0.5, -0.5)
    axis.set(xscale="log", xlabel="measured ms per token")
    _plain_ticks(axis.xaxis, axis.get_xlim())
    axis.grid(alpha=0.25)


def _simulator(axis: Axes, table: pd.DataFrame) -> None:
    markers = dict(zip(dict.fromkeys(table["model"]), "osD^"))
    colors = dict(zip(dict.fromkeys(table["item"]), sns.color_palette("tab20", table["item"].nunique())))
    ends = np.array(
        [
            table[["measured_ms", "simulated_ms"]].min().min() * 0.8,
            table[["measured_ms", "simulated_ms"]].max().max() * 1.25,
        ]
    )
    axis.fill_between(ends, ends * (1 - CLOSE), ends * (1 + CLOSE), color="0.9", label="within 10 %")
    axis.plot(ends, ends, color="0.5", linewidth=0.8)
    for row in table.itertuples():
        axis.plot(row.measured_ms, row.simulated_ms, markers[row.model], color=colors[row.item], markersize=5,
                  mfc=colors[row.item] if row.budget == "high" else "white")  # fmt: skip
    for name, color in colors.items():
        axis.plot([], [], "o", color=color, label=name)
    for model, marker in markers.items():
        axis.plot([], [], marker, color="0.4", label=f"{model}; hollow: low budget")
    axis.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="measured ms per token",
        ylabel="simulated ms per token",
    )
    for side in (axis.xaxis, axis.yaxis):
        _plain_ticks(side, ends)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False)


def _plain_ticks(side: Axis, ends: tuple[float, float]) -> None:
    """1, 2 and 5 times powers of ten."""
    side.set_major_locator(
        FixedLocator(
            [t for power in range(-2, 5) for t in (10**power, 2 * 10**power, 5 * 10**power) if ends[0] <= t <= ends[1]]
        )
    )
    side.set_minor_locator(NullLocator())
    side.set_major_formatter("{x:g}")
