"""elephants-table1: the grouped GEMM with int8 and int4 weights against FP16, by active experts (Elephants, Table 1).

Measured on a GPU: one fully-connected layer of 32 experts, 40 tokens (also 128 and 512) dealt out to 1 to 32 of them,
weights cold in L2, launches in a CUDA graph. The speed-up is over this project's own 16-bit kernel; how near that one
comes to the bandwidth of a copy stands beside it, and torch's grouped product where it knows the type (BF16).
"""

from __future__ import annotations

from dataclasses import asdict

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from specter_lab.experiments.context import Context, Measured, need_gpu, reads_nothing

PAPER_TOKENS, PAPER_SHAPE = 40, "Elephants 1024 x 4096"
NAMES = {"int8 native": "int8-native", "int8 I2F": "int8-optimised", "int4 I2F": "int4-optimised"}  # kernel -> claim
HALF = "16 bit"
REPLAYS = 30  # of each cell
PAPER = {
    "int8 native": (1.05, 1.01, 1.34, 1.40, 1.40, 1.46), "int8 I2F": (1.28, 1.21, 1.21, 1.39, 1.49, 1.59),
    "int4 I2F": (1.24, 1.28, 1.57, 1.73, 1.78, 1.85),
}  # fmt: skip
ACTIVE = (1, 4, 8, 16, 24, 32)

inputs = reads_nothing


def run(context: Context) -> pd.DataFrame:
    """One row per shape, type, kernel, tokens, active experts and state of the L2.

    Raises:
        UserError: no CUDA GPU.
    """
    need_gpu(context)
    import torch
    from tqdm.auto import tqdm

    from specter_lab.engine.kernels import bench_channel as bench

    torch.manual_seed(context.seed)
    copy = bench.copy_gb_s()
    rows = []
    for shape in tqdm(bench.SHAPES, desc="elephants-table1"):
        main = shape == PAPER_SHAPE
        for dtype in bench.TYPES:
            tokens = bench.TOKENS if main else (PAPER_TOKENS,)
            caches = ("cold", "warm") if main else ("cold",)
            active = ACTIVE if shape.startswith("Elephants") else (4, 16, 32)
            rows += [
                asdict(row) for row in bench.rows_of(shape, dtype, copy, tokens=tokens, active=active, caches=caches)
            ]
    return (
        pd.DataFrame(rows)
        .drop(columns="tiles")
        .round({"time_us": 3, "time_low_us": 3, "time_high_us": 3, "floor_us": 3, "read_mb": 3, "copy_gb_s": 1})
    )


def speedups(rows: pd.DataFrame, *, shape: str = PAPER_SHAPE, tokens: int = PAPER_TOKENS, dtype: str = "fp16",
             cache: str = "cold", column: str = "time_us", of_half: str = "time_us") -> pd.DataFrame:  # fmt: skip
    """Speed-up over the 16-bit kernel: kernel (rows) by active experts (columns), by default of the median times."""
    which = (rows["shape"] == shape) & (rows["tokens"] == tokens) & (rows["dtype"] == dtype) & (rows["cache"] == cache)
    kept = rows[which].set_index(["kernel", "active"])
    times, half = kept[column].unstack(), kept[of_half].unstack().loc[HALF]
    return half / times.loc[[kernel for kernel in NAMES if kernel in times.index]]


def geometric_means(table: pd.DataFrame) -> pd.Series:
    """Over active experts, by kernel."""
    return np.exp(np.log(table).mean(axis=1))


def of_traffic(rows: pd.DataFrame, **which) -> pd.DataFrame:
    """Speed-up over the ratio of the bytes read, the most that a kernel bound by memory could gain."""
    table = speedups(rows, **which)
    sizes = rows.drop_duplicates(["kernel", "shape", "active"]).set_index(["shape", "kernel", "active"])["read_mb"]
    shape = which.get("shape", PAPER_SHAPE)
    ratio = pd.DataFrame(
        {a: {k: sizes[shape, HALF, a] / sizes[shape, k, a] for k in table.index} for a in table.columns}
    )
    return table / ratio


def plot(rows: pd.DataFrame) -> Figure:
    """a: speed-up by active experts, ours and the paper's; b: share of a copy's bandwidth."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    colors = dict(zip((*NAMES, HALF), sns.color_palette("colorblind", 4)))
    for kernel, values in speedups(rows).iterrows():
        left.plot(values.index, values, "o-", color=colors[kernel], label=f"{kernel}, ours")
        left.plot(ACTIVE, PAPER[kernel], "x--", color=colors[kernel], lw=1, label=f"{kernel}, the paper's")
    left.set(xlabel=f"active experts ({PAPER_TOKENS} tokens)", ylabel="speed-up over the FP16 kernel", ylim=(0, None))
    left.axhline(1, color="0.6", lw=0.8)
    left.set_title("a  Grouped GEMM 1024 x 4096, FP16, cold L2", loc="left", fontsize=10)
    left.legend(fontsize=7.5)
    kept = rows[
        (rows["shape"] == PAPER_SHAPE)
        & (rows["tokens"] == PAPER_TOKENS)
        & (rows["dtype"] == "fp16")
        & (rows["cache"] == "cold")
    ]
    for kernel, part in kept.groupby("kernel"):
        right.plot(part["active"], part["floor_us"] / part["time_us"], "o-", color=colors[kernel], label=kernel)
    right.set(xlabel="active experts", ylabel="weights read, share of a copy's bandwidth", ylim=(0, 1.1))
    right.set_title("b  How near the memory's limit", loc="left", fontsize=10)
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.set_xticks(ACTIVE)
        axis.grid(alpha=0.25)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Every speed-up of the table, and the geometric means; intervals span the 5th to 95th percentiles of both times."""
    middle, traffic = speedups(rows), of_traffic(rows)
    low = speedups(rows, column="time_high_us", of_half="time_low_us")
    high = speedups(rows, column="time_low_us", of_half="time_high_us")
    found = []
    for kernel, name in NAMES.items():
        for active in ACTIVE:
            cells = (float(table.loc[kernel, active]) for table in (middle, low, high))
            found.append(
                Measured(f"elephants-table1/{name}@{active}", *cells, n=REPLAYS, note="replays of a CUDA graph")
            )
        means = (float(geometric_means(table)[kernel]) for table in (middle, low, high))
        many = traffic.loc[kernel, [a for a in ACTIVE if a >= 16]].min()
        note = f"with 16 experts and more at least {many:.0%} of the ratio of bytes"
        found.append(Measured(f"elephants-table1/geometric-mean@{name}", *means, n=len(ACTIVE), note=note))
    return found
