"""specter-kernel: the fused INT4 multi-expert kernel against one INT4 launch per expert and against BF16 (Specter, SEE).

Measured, weights cold in L2, launches in a CUDA graph: the routed experts of one MoE layer for one drafted token, at the experts' sizes of
the three originals. BF16 is torch's own products, one expert after the other, as an eager decoder computes them; beside it
stands this project's grouped BF16 kernel. The paper's third size, 72K x 18K, is one expert of 8 GB and is not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from specter_lab.experiments.context import Context, Measured, need_gpu, reads_nothing

FUSED, APART, GROUPED, TORCH = "INT4 fused", "INT4 expert by expert", "BF16 grouped", "BF16 torch, expert by expert"
KERNELS = (FUSED, APART, GROUPED, TORCH)
FINE = 1408  # expert width of Qwen and DeepSeek

inputs = reads_nothing


def run(context: Context) -> pd.DataFrame:
    """One row per layer shape, kernel and number of tokens: measured microseconds beside the floor.

    Raises:
        UserError: no CUDA GPU.
    """
    import torch

    need_gpu(context)
    torch.manual_seed(context.seed)
    return pd.DataFrame(_rows())


def _rows() -> Iterator[dict]:
    from specter_lab.engine.kernels import bench

    machine = bench.this_machine()
    for name, layer in bench.LAYERS.items():
        for row in chain(bench.draft_rows(machine, name, layer), bench.verify_rows(machine, name, layer)):
            yield {
                "model": name, "hidden": layer.hidden, "expert_width": layer.width, "kernel": row.what, "tokens": row.tokens,
                "experts": round(row.experts, 2), "device_mb": round(row.device_bytes / 1e6, 3), "host_mb": round(row.host_bytes / 1e6, 3),
                "measured_us": round(row.time_us, 3), "floor_us": round(row.floor_us, 3), "copy_gb_s": round(machine.copy_gb_s, 1),
                "link_gb_s": round(machine.link_gb_s, 2),
            }  # fmt: skip


def one_token(rows: pd.DataFrame) -> pd.DataFrame:
    """Microseconds for one token: layer shapes by kernel."""
    return (
        rows[rows["tokens"] == 1]
        .pivot(index="model", columns="kernel", values="measured_us")[list(KERNELS)]
        .loc[list(dict.fromkeys(rows["model"]))]
    )


def plot(rows: pd.DataFrame) -> Figure:
    """a: one token through a layer's experts; b: windows, by where the experts lie. Time over its floor stands at every bar."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    windows = [name for name in dict.fromkeys(rows["kernel"]) if name not in (APART, GROUPED, TORCH)]
    _bars(left, rows[rows["tokens"] == 1], KERNELS, "a  One token")
    most = rows[rows["tokens"] == rows.loc[rows["kernel"] == "BF16 resident", "tokens"].min()]
    _bars(right, most, windows[1:], f"b  A window of {int(most['tokens'].iloc[0])} tokens")
    plt.close(figure)
    return figure


def _bars(axis, rows: pd.DataFrame, kernels, title: str) -> None:
    models = list(dict.fromkeys(rows["model"]))
    colors = sns.color_palette("colorblind", len(kernels))
    for i, (kernel, color) in enumerate(zip(kernels, colors)):
        part = rows[rows["kernel"] == kernel].set_index("model").reindex(models)
        places = [m + 0.8 / len(kernels) * (i - (len(kernels) - 1) / 2) for m in range(len(models))]
        bars = axis.bar(places, part["measured_us"], width=0.76 / len(kernels), color=color, label=kernel)
        axis.bar_label(
            bars, [f"{ratio:.1f}x" for ratio in part["measured_us"] / part["floor_us"]], fontsize=7, padding=1
        )
    sizes = rows.drop_duplicates("model").set_index("model")
    axis.set_xticks(
        range(len(models)),
        [f"{m}\n{sizes.loc[m, 'hidden']} x {sizes.loc[m, 'expert_width']}" for m in models],
        fontsize=8,
    )
    axis.set(yscale="log", ylabel="measured us per layer", xlabel="(at each bar: time over that of reading its bytes)")
    axis.set_title(title, loc="left", fontsize=10)
    axis.legend(fontsize=8)
    axis.set_ylim(top=8 * rows.loc[rows["kernel"].isin(kernels), "measured_us"].max())  # room for the legend


def claims(rows: pd.DataFrame) -> list[Measured]:
    """The two of the paper, over the layer shapes."""
    us = one_token(rows)
    fine = rows.drop_duplicates("model").set_index("model")["expert_width"] == FINE
    over_bf16 = (us[[GROUPED, TORCH]].min(axis=1) / us[APART])[fine[us.index]]
    over_apart = us[APART] / us[FUSED]
    said = ", ".join(f"{model} {value:.2f}" for model, value in (us[TORCH] / us[APART]).items())
    return [
        Measured("specter-kernel/per-expert-int4", float(over_bf16.min()), n=len(over_bf16), note=f"over the faster BF16, which is the grouped kernel; over torch expert by expert, all sizes: {said}"),
        Measured("specter-kernel/fused-beats-per-expert", float(over_apart.min()), n=len(over_apart),
                 note=", ".join(f"{model} {value:.2f}" for model, value in over_apart.items())),
    ]  # fmt: skip
