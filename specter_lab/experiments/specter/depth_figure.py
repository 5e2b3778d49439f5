"""The figure of specter-depth, from its rows alone."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from specter_lab.experiments.specter.setting import BUDGETS
from specter_lab.measure.acceptance import expected_accepted
from specter_lab.measure.prompts import PROMPT_SETS
from specter_lab.measure.sampling import GREEDY

# What a row is about: its column `by`; `item` says which one.
DEPTH, POSITION, SET, REPEAT = "depth", "position", "prompt set", "repeat"
QUANTIZER, PREFIX, TPOT, BEST = "quantizer", "prefix length", "tpot", "best depth"

PAPER_ACCEPTANCE = 0.9663  # Specter [S]: accepted over checked
DEFINITIONS = {"paper": "-", "steady": "--", "decode": ":"}  # of TPOT -> line style
ACCEPTANCE_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
PAPER_BEST = {family: budget.depth for family, budget in BUDGETS.items()}
OUR_STAR = {"marker": "*", "markersize": 8, "linestyle": "none"}
PAPER_STAR = {"marker": "*", "markersize": 15, "linestyle": "none", "mfc": "white"}


def chosen(rows: pd.DataFrame, by: str, temperature: float = GREEDY, **columns) -> pd.DataFrame:
    """The rows of one kind at one temperature, with these values in other columns."""
    kept = (rows["by"] == by) & (rows["temperature"] == temperature)
    for name, value in columns.items():
        kept &= rows[name] == value
    return rows[kept]


def plot(rows: pd.DataFrame) -> Figure:
    """Acceptance by position, prompt set, quantiser and prefix length; tokens per round; simulated TPOT against K."""
    models = list(dict.fromkeys(rows["model"]))
    colors = dict(zip(models, sns.color_palette("colorblind", len(models))))
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.2), constrained_layout=True)
    for panel, axis in zip((_positions, _tokens_per_round, _tpot, _prompt_sets, _quantizers, _prefixes), axes.flat):
        panel(axis, rows, colors)
        axis.grid(alpha=0.25)
    for axis in axes[1]:
        _acceptance_scale(axis)
        axis.axhline(PAPER_ACCEPTANCE, color="0.4", linewidth=0.8, linestyle=":")
    axes[1, 1].annotate("paper: 0.9663", (0.99, PAPER_ACCEPTANCE), xycoords=("axes fraction", "data"), fontsize=9,
                        color="0.35", ha="right", va="bottom")  # fmt: skip
    figure.legend(*axes[1, 2].get_legend_handles_labels(), loc="outside lower center", ncols=len(models))
    plt.close(figure)
    return figure


def _points(axis: Axes, x: np.ndarray, part: pd.DataFrame, column: str, **style) -> None:
    """Values with their intervals."""
    ends = part[[f"{column}_ci_low", f"{column}_ci_high"]].T.to_numpy()
    axis.errorbar(
        x, part[column], yerr=np.abs(ends - part[column].to_numpy()), **{"capsize": 2, "markersize": 4} | style
    )


def _positions(axis: Axes, rows: pd.DataFrame, colors: dict) -> None:
    depth = int(chosen(rows, POSITION)["depth"].max())
    for model, color in colors.items():
        part = chosen(rows, POSITION, model=model)
        x = part["item"].astype(int)
        axis.plot(x, part["accepted_per_proposed"], color=color, marker=".", linewidth=1)
        ends = (part["accepted_per_proposed_ci_low"], part["accepted_per_proposed_ci_high"])
        axis.fill_between(x, *ends, color=color, alpha=0.15, linewidth=0)
    x = np.arange(1, depth + 1)
    axis.plot(x, PAPER_ACCEPTANCE**x, color="0.3", linewidth=1, linestyle="--")
    axis.annotate("- - paper: $0.9663^i$", (0.04, 0.08), xycoords="axes fraction", fontsize=9, color="0.35")
    axis.set(title=f"a  First i tokens all pass (greedy, K = {depth})", ylim=(0, 1))
    axis.set(xlabel="position i in the drafted window", ylabel="accepted / proposed")


def _tokens_per_round(axis: Axes, rows: pd.DataFrame, colors: dict) -> None:
    acceptances = []
    for i, (model, color) in enumerate(colors.items()):
        shift = 0.35 * (i - (len(colors) - 1) / 2)
        for temperature, marker in ((GREEDY, "o"), (1.0, "^")):
            part = chosen(rows, DEPTH, temperature, model=model)
            filled = color if temperature == GREEDY else "white"
            style = {"color": color, "marker": marker, "linestyle": "none", "mfc": filled}
            _points(axis, part["depth"] + shift, part, "tokens_per_round", **style)
            if temperature == GREEDY:
                acceptances += part["accepted_per_checked"].tolist()
    a, depths = float(np.mean(acceptances)), np.arange(1, 33)
    axis.plot(depths, [1 + expected_accepted(a, k) for k in depths], color="0.3", linewidth=1)
    axis.plot(
        depths, [1 + expected_accepted(PAPER_ACCEPTANCE, k) for k in depths], color="0.3", linewidth=1, linestyle="--"
    )
    axis.axhline(1 + expected_accepted(PAPER_ACCEPTANCE, None), color="0.4", linewidth=0.8, linestyle=":")
    axis.annotate("paper: 1 + a/(1-a) = 29.7, for K → ∞ only", (1, 29.9), fontsize=9, color="0.35", va="bottom")
    axis.annotate("bounded:\n- - paper's a\n— our a = " + f"{a:.3f}", (3, 16), fontsize=9, color="0.35")
    axis.set(title="b  Tokens per round (● greedy, △ T = 1)", xlabel="depth K", ylabel="tokens per round", ylim=(0, 32))


def _tpot(axis: Axes, rows: pd.DataFrame, colors: dict) -> None:
    for model, color in colors.items():
        for definition, style in DEFINITIONS.items():
            part = chosen(rows, TPOT, model=model, budget="high", definition=definition)
            axis.plot(part["depth"], part["simulated_tpot_ms"], linestyle=style, color=color, linewidth=1.2)
            if definition == "paper":
                best = part.loc[part["simulated_tpot_ms"].idxmin()]
                reported = part[part["depth"] == PAPER_BEST.get(part["family"].iloc[0])]
                axis.plot(reported["depth"], reported["simulated_tpot_ms"], color=color, **PAPER_STAR)
                axis.plot(best["depth"], best["simulated_tpot_ms"], color=color, **OUR_STAR)
    for definition, style in DEFINITIONS.items():
        axis.plot([], [], linestyle=style, color="0.3", linewidth=1.2, label=definition)
    axis.plot([], [], color="0.3", label="our K* (paper's formula)", **OUR_STAR)
    axis.plot([], [], color="0.3", label="the paper's K*", **PAPER_STAR)
    axis.legend(fontsize=8, loc=(0.12, 0.33), ncols=2)
    profile = chosen(rows, TPOT)["profile"].iloc[0]
    axis.set(
        title="c  TPOT, simulated",
        xlabel=f"depth K ({profile}, high budget)",
        ylabel="simulated TPOT, ms",
        yscale="log",
    )
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")


def _prompt_sets(axis: Axes, rows: pd.DataFrame, colors: dict) -> None:
    _dots(axis, chosen(rows, SET), PROMPT_SETS, colors)
    axis.set(title="d  By prompt set", ylabel="accepted / checked")


def _quantizers(axis: Axes, rows: pd.DataFrame, colors: dict) -> None:
    part = chosen(rows, QUANTIZER)
    order = part.groupby("item")["accepted_per_checked"].mean().sort_values(ascending=False).index
    _dots(axis, part, order, colors)
    axis.set(title="e  By the draft's quantiser")


def _acceptance_scale(axis: Axes) -> None:
    """One scale for all panels of accepted / checked, which tells 0.98 from 0.99 as well as 0.7 from 0.8."""
    axis.set_yscale("logit", nonpositive="clip")
    axis.set_ylim(0.5, 0.999)
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_yticks(ACCEPTANCE_TICKS, [f"{tick:g}" for tick in ACCEPTANCE_TICKS])


def _dots(axis: Axes, rows: pd.DataFrame, items: tuple, colors: dict) -> None:
    """One dot per item and model, side by side."""
    for i, (model, color) in enumerate(colors.items()):
        part = rows[rows["model"] == model].set_index("item").reindex(items)
        shift = 0.16 * (i - (len(colors) - 1) / 2)
        _points(
            axis, np.arange(len(items)) + shift, part, "accepted_per_checked", color=color, marker="o", linestyle="none"
        )
    axis.set_xticks(range(len(items)), items, rotation=25, ha="right", fontsize=8)


def _prefixes(axis: Axes, rows: pd.DataFrame, colors: dict) -> None:
    for i, (model, color) in enumerate(colors.items()):
        part = chosen(rows, PREFIX, model=model)
        beside = 1.07 ** (i - (len(colors) - 1) / 2)  # on the log axis, so that intervals do not cover each other
        x = beside * part["item"].astype(int)
        _points(axis, x, part, "accepted_per_checked", color=color, marker="o", linewidth=1, label=model)
    lengths = chosen(rows, PREFIX)["item"].astype(int).unique()
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, lengths)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set(title="f  By prefix length", xlabel="prompt tokens")
