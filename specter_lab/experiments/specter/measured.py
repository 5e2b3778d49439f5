"""What specter-engine measured on a GPU, for the notebooks of the figures that the other experiments simulate.

Tables are medians over repeats; simulated times are of the same rounds, on a profile of the same machine.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from specter_lab.experiments.results import Result
from specter_lab.experiments.specter.engine_batch import BATCH
from specter_lab.experiments.specter.engine_runs import ALL_SETS, NO_PREFETCH, PARTS

SETTING = ["model", "budget", "item"]
LANES = ("compute", "H2D")


def about(result: Result) -> str:
    """One sentence: what was measured, where and when."""
    rows, gpu = result.rows, result.provenance["machine"]["gpu"]
    models = ", ".join(f"{model} at the sizes of {original}" for model, original in
                       rows[["model", "original"]].drop_duplicates().itertuples(index=False))  # fmt: skip
    repeats = int(rows.loc[rows["by"] == "system", "repeat"].max()) + 1
    return f"{result.origin} result of specter-engine, {gpu}, {result.provenance['finished'][:10]}: {models}; median of {repeats} repeats"


def tpot(rows: pd.DataFrame) -> pd.DataFrame:
    """TPOT by its definitions, mean over prompt sets, beside steady and simulated ms per token over all of them."""
    systems = rows[rows["by"] == "system"]
    columns = {"measured_ttft_ms": "time to first token, ms", "measured_paper_tpot_ms": "TPOT (paper), ms",
               "measured_end_to_end_ms_per_token": "end to end, ms/token"}  # fmt: skip
    by_set = (
        systems[systems["prompt_set"] != ALL_SETS].groupby([*SETTING, "prompt_set"], sort=False)[list(columns)].median()
    )
    found = by_set.groupby(SETTING, sort=False).mean().rename(columns=columns)
    pooled = _pooled(rows, "system")
    return found.assign(**{"steady, ms/token": pooled["measured_ms_per_token"], "simulated, ms/token": pooled["simulated_ms_per_token"],
                           "MB/token": pooled["link_mb_per_token"]})  # fmt: skip


def hits(rows: pd.DataFrame) -> pd.DataFrame:
    """Distinct experts per layer and pass that were in a slot when the layer's routing was known, and what the others cost."""
    columns = {"slots_per_layer": "slots per layer", "gpu_expert_gb": "GB for experts", "distinct_per_pass": "distinct per pass, all layers",
               "hit_rate": "hit rate", "link_mb_per_token": "MB/token"}  # fmt: skip
    return _pooled(rows, "system")[list(columns)].rename(columns=columns)


def hiding(rows: pd.DataFrame) -> pd.DataFrame:
    """Time of the copies and the part of it that computing waited for, where the host serves the layers."""
    found = _pooled(rows[rows["mode"] == "paper"], "system")
    return pd.DataFrame({
        "copies, ms/token": found["copies_ms_per_token"], "waited, ms/token": found["stall_ms_per_token"],
        "hidden": 1 - found["stall_ms_per_token"] / found["copies_ms_per_token"], "ms/token": found["measured_ms_per_token"],
        "link in use": found["link_busy_share"],
    })  # fmt: skip


def breakdown(rows: pd.DataFrame) -> pd.DataFrame:
    """Demand loading's time: on the link, and everything else."""
    found = _pooled(rows, "system")
    demand = found[found.index.get_level_values("item").isin(["lru", "lru-s"])]
    ms, copies = demand["measured_ms_per_token"], demand["copies_ms_per_token"]
    return pd.DataFrame(
        {"ms/token": ms, "copies, ms/token": copies, "share of copies": copies / ms, "everything else": 1 - copies / ms}
    )


def parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Paper mode without some of its parts (SEE is the engine's kernels, and stays), and fast mode without prefetch."""
    found = _pooled(rows, "part").reindex([*PARTS, NO_PREFETCH], level="item")
    columns = {"slots_per_layer": "slots per layer", "measured_ms_per_token": "ms/token", "simulated_ms_per_token": "simulated, ms/token",
               "link_mb_per_token": "MB/token", "hit_rate": "hit rate", "tokens_per_round": "tokens per round"}  # fmt: skip
    return found[list(columns)].rename(columns=columns)


def precision(rows: pd.DataFrame) -> pd.DataFrame:
    """Plans as they are, and with a share of their experts exchanged for absent ones; the text is the same."""
    untouched = rows[
        (rows["by"] == "system") & rows["item"].isin(["specter", "specter-fast"]) & (rows["budget"] == "high")
    ]
    both = pd.concat([untouched.assign(by="precision"), rows[rows["by"] == "precision"]])
    found = _pooled(both, "precision")
    policy = found.index.get_level_values("item").str.split(" @ ").str[0]
    base = found["measured_ms_per_token"].groupby(policy).transform("first")
    columns = {"measured_ms_per_token": "ms/token", "simulated_ms_per_token": "simulated, ms/token", "hit_rate": "hit rate",
               "link_mb_per_token": "MB/token", "tokens_per_round": "tokens per round"}  # fmt: skip
    return (
        found[list(columns)]
        .rename(columns=columns)
        .assign(factor=found["measured_ms_per_token"] / base)
        .sort_index(kind="stable")
    )


def batches(rows: pd.DataFrame) -> pd.DataFrame:
    """Many requests at a time: TPOT by both clocks, throughput, and what all of them together need and move."""
    columns = {"measured_request_tpot_ms": "TPOT, a request's clock, ms", "measured_batch_tpot_ms": "TPOT, the batch's clock, ms",
               "measured_tokens_per_s": "tokens/s", "measured_end_to_end_tokens_per_s": "tokens/s with prompts", "distinct_per_pass": "distinct per pass, all layers",
               "hit_rate": "hit rate", "link_mb_per_token": "MB/token"}  # fmt: skip
    found = rows[rows["by"] == BATCH].astype({"batch": int}).set_index(["model", "item", "batch"])
    return found[list(columns)].rename(columns=columns)


def exact(rows: pd.DataFrame) -> pd.DataFrame:
    """Greedy tokens before the first that differs from plain decoding with all experts resident."""
    found = rows[rows["by"] == "exact"].groupby(["model", "item"])[["equal_tokens", "n_tokens"]].sum().astype(int)
    return found.rename(columns={"equal_tokens": "bitwise equal", "n_tokens": "n"})


def work_figure(rows: pd.DataFrame) -> Figure:
    """One round of each drawn system on its streams, as device events timed it."""
    work = rows[rows["by"] == "work"]
    work = work.assign(title=work["model"] + ": " + work["item"])
    systems, kinds = list(dict.fromkeys(work["title"])), list(dict.fromkeys(work["work"]))
    colors = dict(zip(kinds, sns.color_palette("colorblind", len(kinds))))
    figure, axes = plt.subplots(
        len(systems), 1, figsize=(7.5, 1.1 * len(systems) + 0.9), sharex=True, squeeze=False, constrained_layout=True
    )
    for axis, system in zip(axes[:, 0], systems):
        of_system = work[work["title"] == system]
        began = of_system["measured_start_ms"].min()
        for (lane, kind), part in of_system.groupby(["stream", "work"]):
            spans = list(zip(part["measured_start_ms"] - began, part["measured_end_ms"] - part["measured_start_ms"]))
            waits = kind == "stall"
            axis.broken_barh(spans, (LANES.index(lane) + (0.3 if waits else -0.35), 0.12 if waits else 0.6), color=colors[kind],
                             edgecolor="none" if waits else "white", linewidth=0.3)  # fmt: skip
        axis.set_yticks(range(len(LANES)), LANES, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(system, loc="left", fontsize=9)
        axis.grid(axis="x", alpha=0.25)
    axes[-1, 0].set_xlabel("measured ms since the round began")
    for kind, color in colors.items():
        axes[0, 0].barh([0], [0], color=color, label=kind)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(kinds), fontsize=8)
    plt.close(figure)
    return figure


def _pooled(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """Numbers over all prompt sets together, median over repeats: model, budget, system."""
    chosen = rows[(rows["by"] == by) & (rows["prompt_set"] == ALL_SETS)]
    return chosen.groupby(SETTING, sort=False).median(numeric_only=True)
