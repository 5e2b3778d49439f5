"""zipmoe-scheduler: how good the blocks' order is (ZipMoE, scheduler).

Layer calls are drawn at random: experts, states, and costs of three machines, one bound by its disk, one by its processor and
one between. Makespans come from the timeline model, so they are **simulated**; what is measured is the order. Small calls are
compared with the best of all orders, all calls with a lower bound that no schedule can beat.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.measure.bootstrap import ratio_interval
from specter_lab.plan.zipmoe.schedule import ORDERS, lower_bound, optimum, timeline
from specter_lab.plan.zipmoe.work import Costs, State, Work, work_of

WORKERS = (1, 2, 3)
COUNTS = (2, 3, 4, 5, 8, 16, 32)  # experts of a call
EXHAUSTIVE = 5
INSTANCES = {2: 60, 3: 60, 4: 60, 5: 30, 8: 60, 16: 60, 32: 60}  # per count, machine and L
MACHINES = {  # seconds of one expert's parts in units of its execution
    "disk-bound": dict(read_sm_s=8.0, read_shard_s=0.9, decompress_s=0.5, recover_s=0.2, execute_s=1.0),
    "balanced": dict(read_sm_s=3.0, read_shard_s=0.4, decompress_s=1.0, recover_s=0.2, execute_s=1.0),
    "processor-bound": dict(read_sm_s=1.0, read_shard_s=0.1, decompress_s=2.0, recover_s=0.2, execute_s=1.0),
}  # fmt: skip


def inputs(context: Context) -> dict[str, str]:
    return {}


def run(context: Context) -> pd.DataFrame:
    """Rows: one per instance and order."""
    work = [
        jobs.Job(f"{machine}, L = {workers}", measure, {"machine": machine, "workers": workers, "seed": context.seed})
        for machine in MACHINES
        for workers in WORKERS
    ]
    return pd.DataFrame(jobs.run(context, work))


def draw(rng: np.random.Generator, count: int, machine: str, workers: int) -> list[Work]:
    """A layer call: states at random; tokens of an expert, and so its execution, between one and four."""
    works = []
    for expert in range(count):
        costs = Costs(**MACHINES[machine], shards=3, workers=workers)
        work = work_of(expert, State(rng.choice(list(State))), costs)
        works.append(Work(expert, work.io_s * rng.uniform(0.8, 1.2), tuple(s * rng.uniform(0.8, 1.2) for s in work.shard_s),
                          work.execute_s * rng.integers(1, 5)))  # fmt: skip
    return works


def measure(machine: str, workers: int, seed: int) -> jobs.Rows:
    """All instances of one machine and number of workers."""
    rng = np.random.default_rng([seed, workers, list(MACHINES).index(machine)])
    rows = []
    for count in COUNTS:
        for instance in range(INSTANCES[count]):
            works = draw(rng, count, machine, workers)
            bound = lower_bound(works, workers)
            best = optimum(works, workers) if count <= EXHAUSTIVE else None
            for name, order in ORDERS.items():
                seconds = timeline(order(works, workers), workers).makespan_s
                rows.append({
                    "machine": machine, "workers": workers, "experts": count, "instance": instance, "order": name,
                    "simulated_makespan": round(seconds, 5), "over_bound": round(seconds / bound, 5),
                    "over_optimum": None if best is None else round(seconds / best, 5),
                })  # fmt: skip
    return rows


def ratio(rows: pd.DataFrame, order: str, column: str = "over_optimum") -> tuple[float, float, float, int]:
    """Mean of a ratio with its bootstrap interval over instances, and how many there are."""
    values = rows.loc[rows["order"] == order, column].dropna().to_numpy()
    found = ratio_interval(values, np.ones_like(values))
    return float(found.estimate), float(found.low), float(found.high), len(values)


def gain(rows: pd.DataFrame, order: str) -> pd.Series:
    """Makespan of an order over that of the blocks, instance by instance."""
    table = rows.pivot(
        index=["machine", "workers", "experts", "instance"], columns="order", values="simulated_makespan"
    )
    return table[order] / table["blocks"]


def plot(rows: pd.DataFrame) -> Figure:
    """Left: over the optimum, small calls. Right: over the lower bound against the number of experts."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4), constrained_layout=True)
    small = rows.dropna(subset="over_optimum")
    sns.boxplot(
        small,
        x="machine",
        y="over_optimum",
        hue="order",
        ax=left,
        palette="colorblind",
        fliersize=1.5,
        linewidth=0.8,
        legend=False,
    )
    left.set(xlabel="", ylabel="simulated makespan / optimum", title=f"at most {EXHAUSTIVE} experts")
    sns.lineplot(
        rows, x="experts", y="over_bound", hue="order", ax=right, palette="colorblind", marker="o", errorbar=("ci", 95)
    )
    right.set(
        xscale="log",
        xlabel="experts of a layer call",
        ylabel="simulated makespan / lower bound",
        title="all machines and L",
    )
    right.set_xticks(COUNTS, labels=[str(count) for count in COUNTS])
    right.minorticks_off()
    for axis in (left, right):
        axis.grid(alpha=0.25, axis="y")
    right.legend(title=None, fontsize=8)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """The paper's factor, the typical ratio, and what an order is worth."""
    mine = rows[(rows["order"] == "blocks")].dropna(subset="over_optimum")
    factor = (mine["over_optimum"] / (3 - 1 / mine["workers"])).max()
    mean, low, high, n = ratio(rows, "blocks")
    gains = gain(rows, "fifo")
    interval = ratio_interval(gains.to_numpy(), np.ones(len(gains)))
    others = "; ".join(f"{name} {gain(rows, name).mean():.3f}" for name in ORDERS if name not in ("blocks", "fifo"))
    worst = f"largest over the optimum {mine['over_optimum'].max():.3f}; over the lower bound {rows.loc[rows['order'] == 'blocks', 'over_bound'].max():.3f}"
    return [
        Measured("zipmoe-scheduler/bound", float(factor), n=len(mine), simulated=True, note=worst),
        Measured("zipmoe-scheduler/typical", mean, low, high, n=n, simulated=True),
        Measured("zipmoe-scheduler/gain", float(interval.estimate), float(interval.low), float(interval.high), n=len(gains),
                 simulated=True, note=f"others over blocks: {others}"),
    ]  # fmt: skip
