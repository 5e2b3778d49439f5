"""The figure of specter-batch, from its rows alone."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from specter_lab.experiments.specter import panels, simulated
from specter_lab.experiments.specter.setting import priced_as

REQUEST_CLOCK, BATCH_CLOCK = "simulated_tpot_ms_per_request", "simulated_tpot_ms_of_batch"
THROUGHPUT, WORKING_SET = "simulated_tokens_per_s", "distinct_experts_per_layer"
PAPER = {  # Specter [S], B = 32: family -> system -> (ms per token, tokens per s)
    "deepseek": {"specter": (119.2, 130.3), "specmoeoff": (718.0, 40.2), "lru-s": (1262.9, 25.3), "transformers": (1493.6, 21.4)},
    "qwen": {"specter": (260.3, None)},
}  # fmt: skip
WITHOUT_WORKING_SET = ("specter-fast", "lru", "transformers")  # their curves lie on those of specter and lru-s


def curve(rows: pd.DataFrame, model: str | None, system: str) -> pd.DataFrame:
    """One system on one model, by batch size."""
    return rows[(rows["model"] == model) & (rows["system"] == system)].set_index("batch").sort_index()


def plot(rows: pd.DataFrame) -> Figure:
    """Top: TPOT by both clocks. Middle: throughput. Bottom: distinct experts. Against B, one column per model."""
    models, systems = (list(dict.fromkeys(rows[column])) for column in ("model", "system"))
    colors = dict(zip(systems, sns.color_palette("colorblind", len(systems))))
    titles, batches = simulated.titles(rows), sorted(rows["batch"].unique())
    figure, axes = plt.subplots(
        3, len(models), figsize=(1.2 + 2.2 * len(models), 7.4), squeeze=False, sharex=True, constrained_layout=True
    )
    for place, (column, model) in enumerate(zip(axes.T, models)):
        tpot, throughput, working_set = column
        family = rows.loc[rows["model"] == model, "family"].iloc[0]
        for system, color in colors.items():
            points = curve(rows, model, system)
            tpot.plot(points.index, points[REQUEST_CLOCK], "-o", color=color, markersize=3, label=titles[system])
            tpot.plot(points.index, points[BATCH_CLOCK], "--", color=color, linewidth=1)
            throughput.plot(points.index, points[THROUGHPUT], "-o", color=color, markersize=3)
            if system not in WITHOUT_WORKING_SET:
                working_set.plot(points.index, points[WORKING_SET], "-o", color=color, markersize=3)
            for axis, value in zip((tpot, throughput), PAPER.get(family, {}).get(system, (None, None))):
                if value is not None:
                    axis.plot(32, value, "*", color=color, mfc="white", markersize=12, linestyle="none", zorder=4)
        working_set.axhline(priced_as(model).num_experts, color="0.4", linestyle=":", linewidth=1)
        working_set.annotate("all experts", (1, priced_as(model).num_experts), fontsize=7, color="0.35", va="bottom")
        tpot.set(yscale="log")
        throughput.set(yscale="log")
        working_set.set(ylim=(0, priced_as(model).num_experts * 1.1), xscale="log")
        working_set.set_xlabel("requests in the batch, B", fontsize=8)
        working_set.set_xticks(batches, batches)
        working_set.minorticks_off()
        for row, axis in enumerate(column):
            panels.title(axis, row * len(models) + place, model if axis is tpot else "")
            axis.tick_params(labelsize=7.5)
            axis.grid(alpha=0.25)
        for axis in (tpot, throughput):
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter(NullFormatter())
    for axis, label in zip(axes[:, 0], ("TPOT, ms per token\n(simulated)", "tokens per s\n(simulated)",
                                        "distinct experts\nper layer and pass")):  # fmt: skip
        axis.set_ylabel(label, fontsize=8)
    first = axes[0, 0]
    first.plot([], [], "-", color="0.3", label="a request's clock")
    first.plot([], [], "--", color="0.3", label="the batch's clock: B / throughput")
    first.plot([], [], "*", color="0.3", mfc="white", markersize=12, linestyle="none", label="the paper, B = 32")
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7.5)
    plt.close(figure)
    return figure
