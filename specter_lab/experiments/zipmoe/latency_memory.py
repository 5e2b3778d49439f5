"""zipmoe-latency-memory: TTFT and TPOT against the memory budget, one request (ZipMoE, latency against memory).

Wide zoo models on this machine's disk, read past the page cache. Every system gets the same bytes for pools and staging
together; `slab_mb` is what it allocated. Load on demand reads every expert for every use and keeps none.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.zipmoe import timed
from specter_lab.experiments.zipmoe.setting import BUDGET, WITH_TRANSLATOR, inputs_of, timed_rows
from specter_lab.experiments.zipmoe.timed import LOAD, ZIP

SHARES = (0.125, 0.25, 0.5)  # of the experts' BF16 bytes
SYSTEMS = (LOAD, "lru", "lfu", ZIP)
REPEATS, NEW_TOKENS = 3, 16


def inputs(context: Context) -> dict[str, str]:
    """Every file that is read, name -> sha256."""
    return inputs_of(context, WITH_TRANSLATOR)


def run(context: Context) -> pd.DataFrame:
    """Rows: model x budget x system x repeat."""
    return timed_rows(context, measure, WITH_TRANSLATOR)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` names what is read."""
    return timed.sweep(
        model, seed, SYSTEMS, REPEATS, [{"budget_share": share} for share in SHARES], lambda _: NEW_TOKENS
    )


def reduction(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """ZipMoE's time over load on demand's, by model and budget."""
    return timed.ratios(rows, metric, "budget_share", above=ZIP, below=LOAD)


def plot(rows: pd.DataFrame) -> Figure:
    """TPOT (top) and TTFT (bottom) against the budget, a column per model."""
    models = list(dict.fromkeys(rows["model"]))
    figure, axes = plt.subplots(2, len(models), figsize=(4.6 * len(models), 6), squeeze=False, constrained_layout=True)
    for column, model in enumerate(models):
        for axis, metric in zip(axes[:, column], ("tpot_ms", "ttft_ms")):
            for system in SYSTEMS:
                part = rows[(rows["model"] == model) & (rows["system"] == system)].groupby("budget_share")[metric]
                middle = part.median()
                errors = (middle - part.min(), part.max() - middle)
                axis.errorbar(
                    100 * middle.index,
                    middle,
                    yerr=errors,
                    marker="o",
                    capsize=3,
                    color=timed.COLORS[system],
                    label=timed.TITLES[system],
                )
            axis.set(xlabel="budget, % of the experts' BF16 bytes", ylabel=f"{metric[:4].upper()}, ms", ylim=(0, None))
            axis.set_xticks([100 * share for share in SHARES])
            axis.grid(alpha=0.25)
        axes[0, column].set_title(f"{model}, widened")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2 * min(2, len(models)), fontsize=8
    )
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Smallest and largest cut over models and budgets, and Qwen's speed at a quarter."""
    name = "zipmoe-latency-memory"
    found = [
        measured
        for claim, metric, translators in (("tpot", "tpot_ms", False), ("ttft", "ttft_ms", False), ("encoder-decoder-tpot", "tpot_ms", True))
        for measured in timed.extremes(f"{name}/{claim}", reduction(rows, metric), "budget_share",
                                       translators=translators, smallest_is_least=False)
    ]  # fmt: skip
    speed = timed.ratios(rows, "tpot_ms", "budget_share")
    quarter = speed[speed["model"].str.startswith("qwen") & (speed["budget_share"] == BUDGET)]
    if quarter.empty:
        return [*found, Measured(f"{name}/twice", None, note="no qwen model was measured")]
    row = quarter.iloc[0]
    return [*found, Measured(f"{name}/twice", float(row["ratio"]), float(row["low"]), float(row["high"]), n=int(row["n"]),
                             note="tokens/s after the prompt; interval: range of the repeats")]  # fmt: skip
