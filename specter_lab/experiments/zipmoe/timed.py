"""What the timed experiments share: systems run next to each other, repeat by repeat, and judged pair by pair.

A machine that others use too is fast in one minute and slow in the next. So a repeat runs every system once, one after the
other, and ratios are taken within a repeat; tables show the median and the range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.figure import Figure

from specter_lab.engine.zipmoe.settings import Settings
from specter_lab.experiments import jobs
from specter_lab.experiments.context import Measured
from specter_lab.experiments.zipmoe.setting import (
    SYSTEMS,
    paired_ratio,
    prompts,
    row_of,
    run_system,
    spread,
)
from specter_lab.models.load import TRANSLATORS

LOAD, ZIP = "load-on-demand", "zipmoe"
COLORS = {LOAD: "0.6", "lru": "#de8f05", "lfu": "#d55e00", ZIP: "#0173b2", "mapped": "#029e73", "accelerate": "#cc78bc"}
TITLES = {LOAD: "load on demand", "lru": "whole experts, LRU", "lfu": "whole experts, LFU", ZIP: "ZipMoE", "mapped": "memory-mapped safetensors",
          "accelerate": "Accelerate, disk offload"}  # fmt: skip


def one_core() -> None:
    """The executor takes one thread; the other cores are the workers'."""
    torch.set_num_threads(1)


def sweep(
    model: str, seed: int, systems: Sequence[str | Settings], repeats: int, points: Sequence[dict],
    tokens_of: Callable[[dict], int],
) -> jobs.Rows:  # fmt: skip
    """Rows of every repeat x point x system; a point names `budget_share`, `batch`, `new_tokens` as far as they vary.

    A translator's requests are over in half a second, so there are twice as many repeats.
    """
    one_core()
    rows = []
    for repeat in range(2 * repeats if model in TRANSLATORS else repeats):
        for point in points:
            ids = prompts(model, point.get("batch", 1), seed + repeat)
            for system in systems:
                settings = SYSTEMS[system] if isinstance(system, str) else system
                run = run_system(
                    model, settings, ids, tokens_of(point), share=point.get("budget_share", 0.25), seed=seed
                )
                rows.append(row_of(model, settings.name, run, repeat=repeat, **point))
    return rows


def curves(
    rows: pd.DataFrame, systems: Sequence[str], by: str, metric: str, *, xlabel: str, ylabel: str, log: bool = False
) -> Figure:
    """A metric against `by`, median and range of the repeats, a panel per model."""
    models, ticks = list(dict.fromkeys(rows["model"])), sorted(rows[by].unique())
    figure, axes = plt.subplots(
        1, len(models), figsize=(4.6 * len(models), 3.6), squeeze=False, constrained_layout=True
    )
    for axis, model in zip(axes[0], models):
        for system in systems:
            part = rows[(rows["model"] == model) & (rows["system"] == system)].groupby(by)[metric]
            middle = part.median()
            axis.errorbar(middle.index, middle, yerr=(middle - part.min(), part.max() - middle), marker="o", capsize=3,
                          color=COLORS[system], label=TITLES[system])  # fmt: skip
        axis.set(
            title=f"{model}, widened", xscale="log" if log else "linear", xlabel=xlabel, ylabel=ylabel, ylim=(0, None)
        )
        axis.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0, 0].legend(fontsize=8)
    plt.close(figure)
    return figure


def cells(rows: pd.DataFrame, metric: str, index: Sequence[str], digits: int = 1) -> pd.DataFrame:
    """Median and range of a metric: `index` (rows) by system (columns)."""

    def cell(values: pd.Series) -> str:
        middle, low, high, n = spread(values)
        return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}], n = {n}"

    table = rows.groupby([*index, "system"], sort=False)[metric].apply(cell).unstack("system")
    return table.rename(columns=TITLES)


def ratios(rows: pd.DataFrame, metric: str, by: str, above: str = LOAD, below: str = ZIP) -> pd.DataFrame:
    """Median, low, high and n of a ratio within repeats, for every model and value of `by`."""
    found = [
        (model, point, *paired_ratio(part, metric, above, below))
        for (model, point), part in rows.groupby(["model", by], sort=False)
    ]
    return pd.DataFrame(found, columns=["model", by, "ratio", "low", "high", "n"])


def extremes(
    name: str, table: pd.DataFrame, by: str, *, translators: bool = False, smallest_is_least: bool = True
) -> list[Measured]:
    """The claims of a range, `<name>@smallest` and `@largest`: the points where the gain is least and greatest.

    Args:
        name: of the claims.
        table: `ratios` of all models.
        by: what the points differ in.
        translators: whether the claims are about encoder-decoders, or about decoder-only models.
        smallest_is_least: whether a small ratio is a small gain.
    """
    mine = table[table["model"].isin(TRANSLATORS) == translators]
    if mine.empty:
        kind = "encoder-decoder" if translators else "decoder-only"
        return [
            Measured(f"{name}@{which}", None, note=f"no {kind} model was measured") for which in ("smallest", "largest")
        ]
    order = mine.sort_values("ratio", ascending=smallest_is_least)
    return [
        Measured(f"{name}@{which}", float(row["ratio"]), float(row["low"]), float(row["high"]), n=int(row["n"]),
                 note=f"{row['model']}, {by.replace('_', ' ')} {row[by]}; interval: range of the repeats")
        for which, row in (("smallest", order.iloc[0]), ("largest", order.iloc[-1]))
    ]  # fmt: skip
