"""zipmoe-page-cache: what the operating system's page cache does for either side (ZipMoE, page cache).

The baseline is what a user would do: experts used in place from memory-mapped safetensors; whatever the page cache holds costs
nothing. *Cold*: the baseline's pages are dropped before every token, so that no expert is found there, and the runtime reads
past the cache. *Filling*: pages are dropped once, before the prompt, and the cache may keep all it reads, which is more memory
than the runtime's budget. *Warm*: everything is in the cache; the runtime sees this (mincore) and uses its raw copies in place.
Accelerate's disk offload reads a layer's experts whole for every call; it is timed over a few tokens.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from torch import Tensor

from specter_lab.engine.store.layout import EXPERTS, RAW
from specter_lab.engine.store.reader import BUFFERED, drop_pages, warm_pages
from specter_lab.engine.zipmoe.baselines import open_accelerate, open_mapped
from specter_lab.engine.zipmoe.model import Generation, generate, open_store
from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.zipmoe import timed
from specter_lab.experiments.zipmoe.peers import peer_rows
from specter_lab.experiments.zipmoe.setting import (
    BUDGET,
    ZIP,
    Wide,
    inputs_of,
    popularity,
    prompts,
    scratch,
    served_models,
    timed_rows,
    wide,
)
from specter_lab.experiments.zipmoe.timed import COLORS, TITLES

COLD, FILLING, WARM = CACHES = ("cold", "filling", "warm")
MAPPED, ACCELERATE = "mapped", "accelerate"
REPEATS, NEW_TOKENS, SLOW_TOKENS = 3, 16, 3
inputs = inputs_of


def run(context: Context) -> pd.DataFrame:
    """Rows: model x cache x system x repeat; systems that are absent have one row that says why."""
    rows = timed_rows(context, measure)
    return pd.concat([rows, pd.DataFrame(peer_rows(context, served_models(context)))], ignore_index=True)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` names what is read."""
    timed.one_core()
    ready = wide(model)
    rows = []
    for repeat in range(REPEATS):
        ids = prompts(model, 1, seed + repeat)
        for cache in CACHES:
            rows.append(_row(model, MAPPED, cache, repeat, _mapped(ready, ids, cache)))
            rows.append(_row(model, timed.ZIP, cache, repeat, _ours(ready, ids, cache, model, seed)))
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:  # last: it writes as much as the experts
        accelerated = open_accelerate(ready.checkpoint, Path(folder)).model
        done = generate(accelerated, prompts(model, 1, seed), SLOW_TOKENS)
        return [*rows, _row(model, ACCELERATE, WARM, 0, done)]


def _prepare(ready: Wide, cache: str) -> None:
    files = [*ready.checkpoint.glob("*.safetensors"), ready.store / RAW, ready.store / EXPERTS]
    for file in files:
        (warm_pages if cache == WARM else drop_pages)(file)


def _mapped(ready: Wide, ids: Tensor, cache: str) -> Generation:
    mapped = open_mapped(ready.checkpoint, ready.store)

    def prepare(_: Tensor | None = None) -> None:  # not timed
        mapped.unmap()
        _prepare(ready, cache)

    prepare()  # opening it has read nearly everything: it touches every matrix, and the system reads ahead
    again = {"on_logits": prepare} if cache == COLD else {}
    done = generate(mapped.model, ids, NEW_TOKENS, **again)
    mapped.unmap()  # a model is a cycle, and outlives this: what it maps could not be dropped for the next one
    return done


def _ours(ready: Wide, ids: Tensor, cache: str, model: str, seed: int) -> Generation:
    _prepare(ready, cache)
    settings = replace(ZIP, in_place=True, read_mode=BUFFERED) if cache == WARM else ZIP
    with open_store(
        ready.store, ready.budget_bytes(BUDGET), settings=settings, popularity=popularity(model, seed), check=False
    ) as served:
        return generate(served.model, ids, NEW_TOKENS)


def _row(model: str, system: str, cache: str, repeat: int, done: Generation) -> dict:
    return {"model": model, "system": system, "cache": cache, "repeat": repeat, "new_tokens": done.tokens.shape[1],
            "ttft_ms": round(1e3 * done.ttft_s, 3), "tpot_ms": round(1e3 * done.tpot_s, 3)}  # fmt: skip


def timed_only(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of systems that ran."""
    return rows.dropna(subset="tpot_ms")


def over_mapped(rows: pd.DataFrame, metric: str, cache: str) -> tuple[float, float, float, int]:
    """ZipMoE's time over the memory-mapped baseline's, within repeats, all models: median, low, high, n."""
    part = timed_only(rows)
    part = part[(part["cache"] == cache) & part["system"].isin([MAPPED, timed.ZIP])]
    table = part.pivot(index=["model", "repeat"], columns="system", values=metric)
    ratio = table[timed.ZIP] / table[MAPPED]
    return float(ratio.median()), float(ratio.min()), float(ratio.max()), len(ratio)


def plot(rows: pd.DataFrame) -> Figure:
    """TPOT by state of the page cache, a panel per model; logarithmic."""
    rows = timed_only(rows)
    models = list(dict.fromkeys(rows["model"]))
    figure, axes = plt.subplots(
        1, len(models), figsize=(5 * len(models), 3.8), squeeze=False, sharey=True, constrained_layout=True
    )
    for axis, model in zip(axes[0], models):
        for offset, system in enumerate((MAPPED, timed.ZIP, ACCELERATE)):
            part = rows[(rows["model"] == model) & (rows["system"] == system)].groupby("cache")["tpot_ms"]
            middle = part.median().reindex([c for c in CACHES if c in part.groups])
            at = [CACHES.index(c) + 0.27 * (offset - 1) for c in middle.index]
            errors = (middle - part.min().reindex(middle.index), part.max().reindex(middle.index) - middle)
            axis.bar(at, middle, 0.25, yerr=errors, capsize=3, color=COLORS[system], label=TITLES[system])
            for x, value, top in zip(at, middle, part.max().reindex(middle.index)):
                axis.annotate(
                    f"{value:.0f}", (x, top), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=8
                )
        axis.set_xticks(range(len(CACHES)), labels=CACHES)
        axis.set(title=f"{model}, widened", xlabel="page cache", yscale="log")
        axis.grid(alpha=0.25, axis="y")
    axes[0, 0].set_ylabel("TPOT, ms")
    axes[0, 0].set_ylim(top=axes[0, 0].get_ylim()[1] * 2)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Cold against the mapped baseline, what is left of the advantage, and the warm comparison."""
    found = []
    for metric in ("ttft", "tpot"):
        value, low, high, n = over_mapped(rows, f"{metric}_ms", COLD)
        found.append(
            Measured(
                f"zipmoe-page-cache/latency@{metric}", value, low, high, n=n, note="interval: range of the repeats"
            )
        )
    value, low, high, n = over_mapped(rows, "tpot_ms", WARM)
    fillings = over_mapped(rows, "tpot_ms", FILLING)[0]
    note = "what the paper compares (its baseline with and without the page cache) has no counterpart: the runtime never relies on it"
    return [
        *found,
        Measured("zipmoe-page-cache/advantage-kept", None, note=note),
        Measured("zipmoe-page-cache/warm", 1 / value, 1 / high, 1 / low, n=n,
                 note=f"interval: range of the repeats; while the cache fills {1 / fillings:.2f}x"),
    ]  # fmt: skip
