"""zipmoe-latency-length: time of a whole request against the length of its output (ZipMoE, latency against length).

Prompt included; pools are filled by a few tokens first, as in a running service. Budget: a quarter of the experts' BF16 bytes.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.zipmoe import timed
from specter_lab.experiments.zipmoe.setting import inputs_of, timed_rows
from specter_lab.experiments.zipmoe.timed import LOAD, ZIP

LENGTHS = (8, 24, 72)  # new tokens
SYSTEMS = (LOAD, "lru", ZIP)
REPEATS = 2
inputs = inputs_of


def run(context: Context) -> pd.DataFrame:
    """Rows: model x length x system x repeat."""
    return timed_rows(context, measure)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` names what is read."""
    return timed.sweep(
        model, seed, SYSTEMS, REPEATS, [{"new_tokens": length} for length in LENGTHS], lambda p: p["new_tokens"]
    )


def plot(rows: pd.DataFrame) -> Figure:
    """Seconds of a request against new tokens, a panel per model."""
    models = list(dict.fromkeys(rows["model"]))
    figure, axes = plt.subplots(
        1, len(models), figsize=(4.6 * len(models), 3.6), squeeze=False, constrained_layout=True
    )
    for axis, model in zip(axes[0], models):
        for system in SYSTEMS:
            part = rows[(rows["model"] == model) & (rows["system"] == system)].groupby("new_tokens")["total_s"]
            middle = part.median()
            axis.errorbar(middle.index, middle, yerr=(middle - part.min(), part.max() - middle), marker="o", capsize=3,
                          color=timed.COLORS[system], label=timed.TITLES[system])  # fmt: skip
        axis.set(
            title=f"{model}, widened",
            xlabel="new tokens",
            ylabel="seconds, prompt included",
            ylim=(0, None),
            xticks=LENGTHS,
        )
        axis.grid(alpha=0.25)
    axes[0, 0].legend(fontsize=8)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Smallest and largest factor over models and lengths."""
    name = "zipmoe-latency-length"
    table = timed.ratios(rows, "total_s", "new_tokens")
    return [
        *timed.extremes(f"{name}/decoder", table, "new_tokens"),
        *timed.no_encoder_decoder(f"{name}/encoder-decoder"),
    ]
