"""elephants-table4: an audit of the cost table's arithmetic, open for the reader's own price and speed.

Nothing is timed here. The cost column is monthly price / (words/s); recomputing it from the printed prices and speeds
shows which entries follow and which need a factor that is not stated. Intervals are those of the printed digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from specter_lab.errors import UserError
from specter_lab.experiments.context import Context, Measured

SECONDS_PER_MONTH = 365.25 / 12 * 24 * 3600
UNSTATED = 8  # what the first row's cost is divided by, without a word


@dataclass(frozen=True)
class Offer:
    """A machine, a model on it, and what the paper prints about both."""

    name: str
    price_usd: float  # per month
    batch: int  # sentences
    latency_ms: float
    words_per_s: float
    stated_cost: float


PAPER = (
    Offer("avx512-0.04B", 587.65, 1, 75, 351, 0.209),
    Offer("avx512-5.32B", 587.65, 1, 1080, 26, 22.602),
    Offer("t4-batch20", 390.55, 20, 421, 1565, 0.250),
    Offer("t4-batch64", 390.55, 64, 824, 2560, 0.153),
)
SMALL, BEST = PAPER[0].name, PAPER[-1].name


def cost(price_usd: float, words_per_s: float) -> float:
    """The table's measure: dollars a month per word a second.

    Raises:
        UserError: a speed of zero or less.
    """
    if words_per_s <= 0:
        raise UserError(f"{words_per_s} words/s is no speed: give a positive number")
    return price_usd / words_per_s


def usd_per_million_words(price_usd: float, words_per_s: float) -> float:
    """The same in a unit that a bill has: dollars for a million words on a machine that never waits."""
    return cost(price_usd, words_per_s) / SECONDS_PER_MONTH * 1e6


def inputs(context: Context) -> dict[str, str]:
    """Nothing: the printed numbers stand in this file."""
    return {}


def run(context: Context) -> pd.DataFrame:
    """One row per line of the table: printed values, the recomputed cost, and what the printed digits leave open."""
    return pd.DataFrame([_row(offer) for offer in PAPER])


def _row(offer: Offer) -> dict:
    price, speed = offer.price_usd, offer.words_per_s
    return {
        "name": offer.name, "price_usd_per_month": price, "batch": offer.batch, "latency_ms": offer.latency_ms,
        "words_per_s": speed, "stated_cost": offer.stated_cost, "cost": cost(price, speed),
        "cost_low": cost(price - 0.005, speed + 0.5), "cost_high": cost(price + 0.005, speed - 0.5),
        "cost_over_stated": cost(price, speed) / offer.stated_cost,
        "usd_per_million_words": usd_per_million_words(price, speed),
        "implied_words_per_sentence": speed * offer.latency_ms / 1e3 / offer.batch,
    }  # fmt: skip


def against(rows: pd.DataFrame, price_usd: float, words_per_s: float) -> pd.DataFrame:
    """A machine of the reader's own beside the table: cost, dollars per million words, and cost over each line's."""
    yours = cost(price_usd, words_per_s)
    table = rows.set_index("name")[["cost", "usd_per_million_words"]]
    table.loc["yours"] = [yours, usd_per_million_words(price_usd, words_per_s)]
    return table.assign(yours_over_it=yours / table["cost"])


def plot(rows: pd.DataFrame) -> Figure:
    """Stated and recomputed cost of every line, on a logarithmic scale."""
    figure, axis = plt.subplots(figsize=(7.5, 3.8), constrained_layout=True)
    colors = sns.color_palette("colorblind", 2)
    for shift, column, color, label in (
        (-0.2, "stated_cost", colors[0], "as printed"),
        (0.2, "cost", colors[1], "price / (words/s)"),
    ):
        places = [i + shift for i in range(len(rows))]
        bars = axis.bar(places, rows[column], width=0.38, color=color, label=label)
        axis.bar_label(bars, fmt="%.3f", fontsize=8, padding=2)
    off = rows["cost_over_stated"].iloc[0]
    axis.text(0.1, 2.6, f"{off:.2f}x the printed\ncost: not stated why", fontsize=8, ha="center", va="bottom")
    axis.set_xticks(range(len(rows)), rows["name"])
    axis.set(yscale="log", ylabel="dollars a month per word/s", ylim=(0.05, 100))
    axis.legend(fontsize=8)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """The cost column line by line, and the saving as printed."""
    by_name = rows.set_index("name")
    found = [
        Measured(f"elephants-table4/cost@{name}", row["cost"], row["cost_low"], row["cost_high"], n=1, note="recomputed from the printed price and speed")
        for name, row in by_name.iterrows()
        if name != SMALL
    ]  # fmt: skip
    small = by_name.loc[SMALL]
    stated, recomputed = (by_name.loc[BEST, column] / small[column] for column in ("stated_cost", "cost"))
    earlier = by_name.loc["t4-batch20", "stated_cost"] / small["stated_cost"]
    return found + [
        Measured("elephants-table4/cost-small-model", small["cost"], small["cost_low"], small["cost_high"], n=1,
                 note=f"divided by {UNSTATED} it is {small['cost'] / UNSTATED:.3f}"),
        Measured("elephants-table4/saving", stated, n=1,
                 note=f"from the printed costs; by the column's own definition {recomputed:.3f}; at batch 20 {earlier:.2f}, which is no saving"),
    ]  # fmt: skip
