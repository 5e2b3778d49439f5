"""elephants-table3: input tokens per second of the whole translator by batch and beam (Elephants, Table 3).

Measured on a GPU in the paper's geometry (24 + 12 layers, 32 experts, 5.3B) with random weights, FP16: a naive loop over
experts, the grouped GEMM, and the grouped GEMM with int8 and int4 experts. The paper's own GPU is not known, so ratios
are compared, not speeds. Sentences have 32 tokens and become 32.
"""

from __future__ import annotations

from dataclasses import asdict

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from specter_lab.experiments.context import Context, Measured, need_gpu, reads_nothing

BATCHES = (1, 8, 20, 32, 64, 96)
NAIVE, GROUPED, INT8, INT4 = SYSTEMS = ("naive loop", "grouped, 16 bit", "grouped, int8", "grouped, int4")
PAPER = {  # beam 1, input tokens/s
    NAIVE: (16, 70, 150, 214, 379, 485), GROUPED: (388, 1594, 3025, 4008, 5371, 6689),
    INT8: (401, 1639, 3178, 4264, 5706, 7101), INT4: (400, 1662, 3247, 4379, 5935, 7483),
}  # fmt: skip
RATIOS = {"fp16-over-torch": (GROUPED, NAIVE), "int8-over-fp16": (INT8, GROUPED), "int4-over-fp16": (INT4, GROUPED)}

inputs = reads_nothing


def run(context: Context) -> pd.DataFrame:
    """One row per system, batch and beam.

    Raises:
        UserError: no CUDA GPU.
    """
    need_gpu(context)
    import torch
    from tqdm.auto import tqdm

    from specter_lab.engine import bench_translate as bench

    torch.manual_seed(context.seed)
    rows = []
    for system in tqdm(bench.SYSTEMS, desc="elephants-table3"):
        model = bench.random_model(system)
        rows += [asdict(row) | {"input_tokens_s": row.input_tokens_s} for row in bench.speed_rows(system, model)]
        del model
        torch.cuda.empty_cache()
    return pd.DataFrame(rows)


def speeds(rows: pd.DataFrame, beam: int = 1) -> pd.DataFrame:
    """Input tokens/s: system (rows) by batch (columns)."""
    return rows[rows["beam"] == beam].pivot(index="system", columns="batch", values="input_tokens_s").loc[list(SYSTEMS)]


def ratio(rows: pd.DataFrame, over: str, under: str, batch: int, beam: int) -> tuple[float, float, float, int]:
    """Speed of one system over another's: of the medians, the worst and best of all repeats, and their number."""
    by = rows[(rows["batch"] == batch) & (rows["beam"] == beam)].set_index("system")
    fast, slow = by.loc[over], by.loc[under]
    return (slow["seconds"] / fast["seconds"], slow["seconds_low"] / fast["seconds_high"],
            slow["seconds_high"] / fast["seconds_low"], int(min(fast["repeats"], slow["repeats"])))  # fmt: skip


def ratios(rows: pd.DataFrame, beam: int = 1) -> pd.DataFrame:
    """The table's three ratios (rows) by batch (columns)."""
    return pd.DataFrame(
        {batch: {name: ratio(rows, *pair, batch, beam)[0] for name, pair in RATIOS.items()} for batch in BATCHES}
    )


def papers_ratios() -> pd.DataFrame:
    """The same from the paper's speeds, beam 1."""
    paper = pd.DataFrame(PAPER, index=BATCHES).T
    return pd.DataFrame({name: paper.loc[over] / paper.loc[under] for name, (over, under) in RATIOS.items()}).T


def plot(rows: pd.DataFrame) -> Figure:
    """a: input tokens/s by batch; b: ratios, ours and the paper's."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    colors = dict(zip(SYSTEMS, sns.color_palette("colorblind", len(SYSTEMS))))
    for beam, style in ((1, "o-"), (2, "s:")):
        for system, values in speeds(rows, beam).iterrows():
            left.plot(values.index, values, style, ms=4, color=colors[system], label=f"{system}, beam {beam}")
    left.set(xscale="log", yscale="log", xlabel="batch, sentences", ylabel="input tokens/s")
    left.set_title("a  The whole translator, 5.3B, random weights", loc="left", fontsize=10)
    left.set_ylim(top=30 * rows["input_tokens_s"].max())  # room for the legend
    left.legend(fontsize=7.5, ncols=2, loc="upper left")
    ours, paper = ratios(rows), papers_ratios()
    shades = sns.color_palette("colorblind", 6)[3:]
    for (name, values), color in zip(ours.iterrows(), shades):
        right.plot(values.index, values, "o-", ms=4, color=color, label=f"{name}, ours")
        right.plot(BATCHES, paper.loc[name], "x--", color=color, lw=1, label=f"{name}, the paper's")
    right.set(xscale="log", yscale="log", xlabel="batch, sentences", ylabel="speed over speed (beam 1)")
    right.set_title("b  Ratios", loc="left", fontsize=10)
    right.legend(fontsize=7.5, loc="center right")
    for axis in (left, right):
        axis.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """The ratios by batch, and the headline at batch 1 and beam 2."""
    note = "median of the repeats; the interval holds their extremes"
    found = []
    for name, pair in RATIOS.items():
        for batch in BATCHES:
            value, low, high, n = ratio(rows, *pair, batch, 1)
            found.append(
                Measured(f"elephants-table3/{name}@{batch}", float(value), float(low), float(high), n=n, note=note)
            )
    value, low, high, n = ratio(rows, GROUPED, NAIVE, 1, 2)
    return [*found, Measured("elephants-table3/headline", float(value), float(low), float(high), n=n, note=note)]
