"""zipmoe-io-stall: how much of decoding waits for experts (ZipMoE, I/O stall), on a fast and a slow tier.

The system is demand loading of whole experts with an LRU cache of a quarter of the bytes, one read after the other: what the
paper measures before it introduces its own. The fast tier is the page cache (reads are copies from memory), the slow tier this
machine's disk, read past it. A stall is time in which the executor has nothing to do because an expert is not there.
"""

from __future__ import annotations

from dataclasses import replace

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from specter_lab.engine.store.layout import EXPERTS, RAW
from specter_lab.engine.store.reader import BUFFERED, warm_pages
from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.zipmoe import timed
from specter_lab.experiments.zipmoe.setting import SYSTEMS, ZIP, inputs_of, paired_ratio, timed_rows, wide
from specter_lab.measure.host_speed import cpu_name

FAST, SLOW = "page cache", "disk"
REPEATS, NEW_TOKENS = 3, 24
DEMAND = "demand loading, LRU"
inputs = inputs_of


def run(context: Context) -> pd.DataFrame:
    """Rows: model x system x tier x repeat."""
    return timed_rows(context, measure)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` names what is read."""
    ready = wide(model)
    for file in (EXPERTS, RAW):
        warm_pages(ready.store / file)
    systems = [
        replace(base, name=f"{name}, {tier}", read_mode=BUFFERED if tier == FAST else base.read_mode)
        for name, base in ((DEMAND, SYSTEMS["lru"]), ("ZipMoE", ZIP))
        for tier in (FAST, SLOW)
    ]
    rows = timed.sweep(model, seed, systems, REPEATS, [{}], lambda _: NEW_TOKENS)
    return [row | dict(zip(("shown", "tier"), row["system"].rsplit(", ", 1))) | {"machine": cpu_name()} for row in rows]


def plot(rows: pd.DataFrame) -> Figure:
    """Stall share by system and tier, a panel per model."""
    models = list(dict.fromkeys(rows["model"]))
    figure, axes = plt.subplots(
        1, len(models), figsize=(4.6 * len(models), 3.6), squeeze=False, sharey=True, constrained_layout=True
    )
    for axis, model in zip(axes[0], models):
        for offset, (tier, color) in enumerate(((FAST, "#029e73"), (SLOW, "#0173b2"))):
            part = rows[(rows["model"] == model) & (rows["tier"] == tier)].groupby("shown", sort=False)["stall_share"]
            middle = part.median()
            at = [i + 0.36 * (offset - 0.5) for i in range(len(middle))]
            axis.bar(
                at, middle, 0.34, yerr=(middle - part.min(), part.max() - middle), capsize=3, color=color, label=tier
            )
            for x, value in zip(at, middle):
                axis.annotate(f"{value:.0%}", (x, 0.02), ha="center", fontsize=8, color="white")
        axis.set_xticks(range(len(middle)), labels=middle.index)
        axis.set(title=f"{model}, widened", ylim=(0, 1))
        axis.grid(alpha=0.25, axis="y")
    for height, name in ((0.385, "the paper, fast tier"), (0.801, "the paper, slow tier")):
        for axis in axes[0]:
            axis.axhline(height, color="black", linewidth=0.9, linestyle=":" if height < 0.5 else "--", label=name)
    axes[0, 0].set_ylabel("share of decoding that is stalled")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2 * min(2, len(models)), fontsize=8
    )
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Demand loading on both tiers, over all models."""
    mine = rows[rows["shown"] == DEMAND]
    found = []
    for claim, tier in (("fast", FAST), ("slow", SLOW)):
        values = mine.loc[mine["tier"] == tier, "stall_share"]
        found.append(
            Measured(
                f"zipmoe-io-stall/stall-share@{claim}",
                float(values.median()),
                float(values.min()),
                float(values.max()),
                n=len(values),
            )
        )
    value, low, high, n = paired_ratio(mine, "stall_share", f"{DEMAND}, {SLOW}", f"{DEMAND}, {FAST}")
    return [
        *found,
        Measured("zipmoe-io-stall/slow-stalls-more", value, low, high, n=n, note="interval: range of the repeats"),
    ]
