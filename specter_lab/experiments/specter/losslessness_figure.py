"""The figure of specter-losslessness, from its rows alone."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specter_lab.measure.distribution import STANDARD

PARITY, WIDTH, RULE = "parity", "width", "rule"  # what a row is about: its column `by`


def plot(rows: pd.DataFrame) -> Figure:
    """Tokens before the first divergence; rounding against margins; distance from the exact law by accept rule."""
    models = list(dict.fromkeys(rows["model"]))
    colors = dict(zip(models, sns.color_palette("colorblind", len(models))))
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.3), constrained_layout=True, width_ratios=(1, 1, 1.1))
    for panel, axis in zip((_parity, _rounding, _rules), axes):
        panel(axis, rows, colors)
        axis.grid(alpha=0.25)
    handles = [plt.Line2D([], [], color=color, marker="o", linestyle="none", label=m) for m, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(models))
    plt.close(figure)
    return figure


def _parity(axis: Axes, rows: pd.DataFrame, colors: dict) -> None:
    part = rows[rows["by"] == PARITY]
    precisions = list(dict.fromkeys(part["precision"]))
    for x, precision in enumerate(precisions):
        for i, (model, color) in enumerate(colors.items()):
            mine = part[(part["precision"] == precision) & (part["model"] == model)]
            at = x + 0.25 * (i - (len(colors) - 1) / 2) + np.linspace(-0.08, 0.08, len(mine))
            parted = (mine["equal_tokens"] < mine["new_tokens"]).to_numpy()
            axis.vlines(at, 0, mine["equal_tokens"], color=color, linewidth=2)
            axis.plot(at[parted], mine["equal_tokens"][parted], "x", color="black", markersize=6)
    axis.plot([], [], "x", color="black", label="first divergence")
    axis.axhline(part["new_tokens"].max(), color="0.4", linewidth=0.8, linestyle=":")
    axis.legend(fontsize=8, loc="upper left")
    axis.set(ylim=(0, 1.2 * part["new_tokens"].max()), ylabel="new tokens before the first divergence")
    axis.set_title("a  Greedy: equal to plain decoding")
    axis.set_xticks(range(len(precisions)), precisions)


def _rounding(axis: Axes, rows: pd.DataFrame, colors: dict) -> None:
    part = rows[rows["by"] == WIDTH]
    for precision, style in zip(dict.fromkeys(part["precision"]), ("-", "--")):
        for model, color in colors.items():
            mine = part[(part["precision"] == precision) & (part["model"] == model) & (part["difference"] > 0)]
            axis.plot(mine["difference"], mine["item"].astype(float), style, color=color, linewidth=1.2)
        axis.plot([], [], style, color="0.3", label=f"logit difference, {precision}")
    for model, color in colors.items():
        mine = part[(part["precision"] == part["precision"].iloc[0]) & (part["model"] == model)]
        axis.plot(mine["margin"], mine["item"].astype(float), color=color, linewidth=3, alpha=0.35)
    axis.plot([], [], color="0.3", linewidth=3, alpha=0.35, label="margin of the best token")
    width = int(part["depth"].iloc[0]) + 1
    axis.set(title=f"b  Passes of {width} tokens round differently", xscale="log", xlabel="logits",
             ylabel="share of tokens at or below")  # fmt: skip
    axis.legend(fontsize=8)


def _rules(axis: Axes, rows: pd.DataFrame, colors: dict) -> None:
    part = rows[rows["by"] == RULE].copy()
    part["test"] = part["item"] + "\n" + part["quantizer"] + ", T = " + part["temperature"].astype(str)
    tests = list(dict.fromkeys(part["test"]))
    for i, (model, color) in enumerate(colors.items()):
        mine = part[part["model"] == model].set_index("test").reindex(tests)
        at = np.arange(len(tests)) + 0.2 * (i - (len(colors) - 1) / 2)
        axis.plot(mine["total_variation_at_most"], at, "o", color=color, markersize=5)
        axis.plot(mine["draft_total_variation"], at, "|", color=color, markersize=9)
        for y, p in zip(at, mine["p_value"]):
            text = f"p = {p:.2f}" if p > 1e-3 else "p < 0.001"
            axis.annotate(text, (1.01, y), xycoords=("axes fraction", "data"), fontsize=7, va="center", color=color)
    wrong = [y for y, test in enumerate(tests) if not test.startswith(STANDARD)]
    axis.axhspan(min(wrong) - 0.5, max(wrong) + 0.5, color="tab:red", alpha=0.07)
    axis.annotate(
        "wrong on purpose", (0.98, max(wrong) + 0.42), xycoords=("axes fraction", "data"), fontsize=8, ha="right"
    )
    axis.plot([], [], "o", color="0.3", label="at most (95 %)")
    axis.plot([], [], "|", color="0.3", markersize=9, label="the draft's own distance")
    axis.set(title="c  Sampled: distance from the target's law", xlabel="total variation", xlim=(-0.02, 1))
    axis.set_yticks(range(len(tests)), tests, fontsize=8)
    axis.invert_yaxis()
    axis.legend(fontsize=7, loc="upper right")
