"""zipmoe-table1: what the parts are worth (ZipMoE, Table 1), with two rows the paper lacks.

    baseline         every expert is read whole for every use
    core             codec, scheduler and overlap, whole experts kept by LRU
    + C pools        the memory holds compressed experts instead, by LRU
    + planner        pools F, C, S, E divided by the planner, eviction by rank
    codec off        as the planner's row, but whole experts are read and kept
    scheduler off    as the planner's row, in the router's order

All with a quarter of the experts' BF16 bytes, staging included, read past the page cache.
"""

from __future__ import annotations

from dataclasses import replace

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from specter_lab.engine.zipmoe.memory import layer_budget, sizes_of
from specter_lab.engine.zipmoe.settings import RAW_COPY, Settings
from specter_lab.experiments import jobs
from specter_lab.experiments.claims import share_of_pairs_in_order
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.zipmoe import timed
from specter_lab.experiments.zipmoe.setting import BUDGET, ZIP, inputs_of, paired_ratio, timed_rows, wide
from specter_lab.experiments.zipmoe.timed import LOAD
from specter_lab.plan.zipmoe.pools import Pools

LADDER = (LOAD, "core", "pools", "planner")
ROWS = (*LADDER, "codec off", "scheduler off")
TITLES = {LOAD: "baseline", "core": "core: codec, scheduler,\nLRU of whole experts", "pools": "+ C pools (LRU)", "planner": "+ planner",
          "codec off": "planner's row,\ncodec off", "scheduler off": "planner's row,\nscheduler off"}  # fmt: skip
PAPER = {"deepseek": dict(zip(LADDER, (1.60, 4.43, 5.18, 5.30))), "qwen": dict(zip(LADDER, (1.99, 6.39, 7.64, 7.79)))}
REPEATS, NEW_TOKENS = 3, 24
inputs = inputs_of


def run(context: Context) -> pd.DataFrame:
    """Rows: model x rung x repeat."""
    return timed_rows(context, measure)


def rungs(model: str) -> list[str | Settings]:
    """Settings of every row, the pools sized for this model's budget."""
    index = wide(model).index
    left, sizes = layer_budget(index, ZIP, wide(model).budget_bytes(BUDGET)), sizes_of(index)
    compressed = Pools(0, min(index.num_experts, left // (sizes.sign_mantissa + sizes.exponents)))
    return [
        LOAD,
        replace(ZIP, name="core", rule="lru", pools=Pools(min(index.num_experts, left // sizes.full))),
        replace(ZIP, name="pools", rule="lru", pools=compressed),
        replace(ZIP, name="planner"),
        replace(ZIP, name="codec off", form=RAW_COPY, prefetch=0),
        replace(ZIP, name="scheduler off", scheduled=False),
    ]


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` names what is read."""
    return timed.sweep(model, seed, rungs(model), REPEATS, [{}], lambda _: NEW_TOKENS)


def speedup(rows: pd.DataFrame, model: str, rung: str) -> tuple[float, float, float, int]:
    """Tokens/s over the baseline's, within repeats: median, low, high, n."""
    return paired_ratio(rows[rows["model"] == model], "tokens_per_s", rung, LOAD)


def plot(rows: pd.DataFrame) -> Figure:
    """Tokens/s of every row, a panel per model; the paper's factors as marks."""
    models = list(dict.fromkeys(rows["model"]))
    figure, axes = plt.subplots(1, len(models), figsize=(5.4 * len(models), 4), squeeze=False, constrained_layout=True)
    for axis, model in zip(axes[0], models):
        mine = rows[rows["model"] == model].groupby("system")["tokens_per_s"]
        middle = mine.median().reindex(ROWS)
        errors = (middle - mine.min().reindex(ROWS), mine.max().reindex(ROWS) - middle)
        colors = ["0.6", *["#0173b2"] * 3, *["#de8f05"] * 2]
        axis.barh(range(len(ROWS)), middle, xerr=errors, color=colors, height=0.65, capsize=3)
        paper = PAPER.get(model.split("-")[0])
        if paper:
            marks = [middle[LOAD] * paper[rung] / paper[LOAD] for rung in LADDER[1:]]
            axis.scatter(
                marks, range(1, len(LADDER)), marker="|", s=220, color="black", zorder=3, label="the paper's factor"
            )
            axis.legend(fontsize=8, loc="upper right")
        axis.set_yticks(range(len(ROWS)), labels=[TITLES[rung] for rung in ROWS], fontsize=8)
        axis.invert_yaxis()
        axis.set(title=f"{model}, widened", xlabel="tokens/s, prompt included")
        axis.grid(alpha=0.25, axis="x")
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Speeds and factors of the ladder, its order, and the core's share of the gain."""
    found, orders, cores = [], [], {}
    for family in PAPER:
        model = next((m for m in dict.fromkeys(rows["model"]) if m.startswith(family)), None)
        if model is None:
            continue
        mine, factors = rows[rows["model"] == model].groupby("system"), [1.0]
        for claim, rung in zip(("baseline", *LADDER[1:]), LADDER):
            part = mine.get_group(rung)
            found.append(_absolute(f"{family}-throughput@{claim}", part["tokens_per_s"]))
            if (family, rung) != ("qwen", "planner"):  # the paper's table has no such cell
                found.append(_absolute(f"{family}-latency@{claim}", part["total_s"]))
            if rung != LOAD:
                value, low, high, n = speedup(rows, model, rung)
                factors.append(value)
                note = "interval: range of the repeats"
                found.append(Measured(f"zipmoe-table1/{family}-speedup@{claim}", value, low, high, n=n, note=note))
        orders.append(share_of_pairs_in_order(factors))
        if factors[-1] > 1:
            cores[model] = (factors[1] - 1) / (factors[-1] - 1)
    if not orders:
        return found
    shares = [
        Measured(f"zipmoe-table1/gain-share@{what}", None, note="nothing was gained") for what in ("core", "caching")
    ]
    if cores:
        mean = sum(cores.values()) / len(cores)
        note = "; ".join(f"{model} {core:.2f}" for model, core in cores.items())
        shares = [Measured("zipmoe-table1/gain-share@core", mean, n=len(cores), note=note),
                  Measured("zipmoe-table1/gain-share@caching", 1 - mean, n=len(cores), note=note)]  # fmt: skip
    off = {rung: [speedup(rows, model, rung)[0] for model in dict.fromkeys(rows["model"])] for rung in ROWS[4:]}
    aside = "; ".join(f"{rung}: {', '.join(f'{x:.2f}x' for x in values)}" for rung, values in off.items())
    return [
        *found,
        *shares,
        Measured("zipmoe-table1/stages-in-order", sum(orders) / len(orders), n=len(orders), aside=aside),
    ]


def _absolute(name: str, values: pd.Series) -> Measured:
    return Measured(
        f"zipmoe-table1/{name}", float(values.median()), float(values.min()), float(values.max()), n=len(values)
    )
