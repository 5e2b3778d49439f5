"""The figure of specter-calibration: every cell's value over the paper's, before and after the fit."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from specter_lab.experiments.specter import panels

EXPERIMENTS = (
    "specter-tpot",
    "specter-batch",
    "specter-hit-rate",
    "specter-ablation",
    "specter-io-hiding",
    "specter-robustness",
)
BOUND = 0.25  # of the claims


def plot(rows: pd.DataFrame) -> Figure:
    """Ours over the paper's on a logarithmic axis, a row per cell: hollow before the fit, filled after it."""
    mine = rows[(rows["row"] == "cell") & rows["simulated_uncalibrated"].notna()].reset_index(drop=True)
    blue, orange = sns.color_palette("colorblind", 2)
    half = (len(mine) + 1) // 2
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 0.19 * half + 1.4), constrained_layout=True)
    for letter, (axis, part) in enumerate(zip(axes, (mine.iloc[:half], mine.iloc[half:]))):
        place = np.arange(len(part))[::-1]
        before, after = (part[f"simulated_{name}"] / part["paper"] for name in ("uncalibrated", "calibrated"))
        colors = [orange if held == "held out" else blue for held in part["half"]]
        axis.hlines(place, before, after, color="0.7", linewidth=1)
        axis.scatter(before, place, s=28, facecolors="white", edgecolors=colors, zorder=3)
        axis.scatter(after, place, s=28, c=colors, zorder=4)
        axis.axvspan(1 - BOUND, 1 + BOUND, color="0.9", zorder=0, linewidth=0)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xlim(0.22, 9)
        axis.set_xticks((0.25, 0.5, 1, 2, 4, 8), ("1/4", "1/2", "1", "2", "4", "8"))
        units = part["quantity"].str.split(",").str[0].str.replace("hidden share of copies", "hidden share")
        axis.set_yticks(place, [f"{row.experiment.removeprefix('specter-')}: {row.cell}, {unit}"
                                for row, unit in zip(part.rename(columns={"name": "cell"}).itertuples(), units)], fontsize=7)  # fmt: skip
        axis.set_ylim(-0.7, len(part) - 0.3)
        axis.set_xlabel("simulated value over the paper's", fontsize=8)
        panels.title(axis, letter, "")
        axis.tick_params(axis="x", labelsize=8)
        axis.grid(axis="x", alpha=0.25)
    handles = [
        axes[0].scatter([], [], s=28, facecolors="white", edgecolors="0.3", label="nothing fitted"),
        axes[0].scatter([], [], s=28, c="0.3", label="three numbers fitted"),
        axes[0].scatter([], [], s=28, c=[blue], label="cell of the fitted half"),
        axes[0].scatter([], [], s=28, c=[orange], label="cell held out"),
        plt.Rectangle((0, 0), 1, 1, color="0.9", label=f"within {BOUND:.0%}"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8)
    plt.close(figure)
    return figure
