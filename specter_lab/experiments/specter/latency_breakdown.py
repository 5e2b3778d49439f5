"""specter-latency-breakdown: share of memory operations in offloaded decoding (MoE-SpeQ, latency breakdown).

Plain decoding, one token at a time, routed experts in host memory, nothing hidden: every expert that is not on the GPU
is copied before its layer computes. Measured: how many experts per layer a token misses, without a cache and with an
LRU cache of the paper's slots, on the model's own continuation (sampled: small models repeat themselves greedily, and
repetition flatters a cache). Simulated with the cost model, for the bytes of the model that a zoo model stands for, on
the paper's GPU: copies, GPU kernels, and what the GPU waits for the host's launches.

The paper divides the time in two, memory operations and computing. So does the claim: computing is all time that is not
copying, as a clock around a layer would see it. The share of the kernels alone stands beside it.
"""

from __future__ import annotations

from math import isnan, nan

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from specter_lab.errors import UserError
from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import routing
from specter_lab.experiments.specter.setting import priced_as, slots_of
from specter_lab.measure.locality import lru_residents
from specter_lab.models.anatomy import Anatomy, anatomy_of
from specter_lab.models.load import shown_name
from specter_lab.paths import CACHE
from specter_lab.plan.cost import launches_ms, verify_kernels_ms
from specter_lab.plan.hardware import read_profile

REQUESTS_PER_SET = 25  # five sets: 125 requests
SAMPLED = 1.0  # temperature of the continuation
NO_CACHE, LRU = "no cache", "LRU, {} budget"
MIXTRAL = "Mixtral-8x7B"  # the one model whose share is known; without a cache nothing about it needs measuring
PARTS = {"simulated_h2d_ms": "copies to the GPU", "simulated_kernels_ms": "GPU kernels",
         "simulated_launch_ms": "waiting for launches"}  # fmt: skip
inputs = routing.inputs_of


def run(context: Context) -> pd.DataFrame:
    """One row per model and cache: experts missed per layer and token (measured) and times per token (simulated)."""
    mixtral = anatomy_of(MIXTRAL)
    named = {"model": MIXTRAL, "family": "mixtral", "priced_as": MIXTRAL}
    unmeasured = pd.DataFrame([named | _row(mixtral, NO_CACHE, 0, mixtral.top_k)])
    return pd.concat([routing.rows_per_model(context, measure), unmeasured], ignore_index=True)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` is here to name what it reads in the cache key.

    Raises:
        UserError: a model with one expert per layer.
    """
    question = routing.ask(model, REQUESTS_PER_SET, seed)
    trace, priced, family = routing.decode_trace(question, CACHE, SAMPLED), priced_as(model), routing.family(model)
    if trace.num_experts == 1:
        raise UserError(f"{question.source.name} has one expert per layer, so there is none to cache: name an MoE")
    rows = [_row(priced, NO_CACHE, 0, trace.top_k)]
    for budget, slots in slots_of(model, family).items():
        held = lru_residents(trace, window=1, slots=int(slots)).interval(seed=seed)
        missed = [round(trace.top_k * (1 - float(share)), 4) for share in (held.estimate, held.high, held.low)]
        rows.append(_row(priced, LRU.format(budget), int(slots), *missed) | {"n_requests": held.n_requests})
    base = {"model": question.source.name, "family": family, "priced_as": shown_name(priced.name)}
    return [base | {"n_tokens": trace.num_tokens} | row for row in rows]


def _row(model: Anatomy, cache: str, slots: int, missed: float, low: float = nan, high: float = nan) -> dict:
    """One row; `missed` experts per MoE layer and token, and its interval if it was sampled."""
    profile = read_profile()
    copy_ms = model.moe_layers * profile.h2d_ms(model.expert_bytes)  # one expert in every MoE layer
    kernels_ms = verify_kernels_ms(model, profile, 1, model.top_k)
    launch_wait_ms = max(0.0, launches_ms(model, profile) - kernels_ms)  # kernels hide the rest

    def share(of_ms: float, missing: float) -> float | None:
        """Share of a token's time; None when `missing` was not sampled."""
        return None if isnan(missing) else round(of_ms / (missing * copy_ms + kernels_ms + launch_wait_ms), 5)

    return {
        "cache": cache, "slots_per_layer": slots, "missed_experts_per_layer": missed,
        "missed_ci_low": None if isnan(low) else low, "missed_ci_high": None if isnan(high) else high,
        "h2d_gb_per_token": round(model.moe_layers * missed * model.expert_bytes / 1e9, 4),
        "simulated_h2d_ms": round(missed * copy_ms, 3), "simulated_kernels_ms": round(kernels_ms, 3),
        "simulated_launch_ms": round(launch_wait_ms, 3),
        "simulated_compute_share": share(kernels_ms + launch_wait_ms, missed),
        "simulated_compute_share_ci_low": share(kernels_ms + launch_wait_ms, high),
        "simulated_compute_share_ci_high": share(kernels_ms + launch_wait_ms, low),
        "simulated_kernels_share": share(kernels_ms, missed),
        "simulated_kernels_share_ci_low": share(kernels_ms, high),
        "simulated_kernels_share_ci_high": share(kernels_ms, low),
    }  # fmt: skip


def plot(rows: pd.DataFrame) -> Figure:
    """Stacked horizontal bars: how a token's time divides, per model and cache."""
    figure, axis = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.3), constrained_layout=True)
    colors = sns.color_palette("colorblind", 3)
    totals = rows[list(PARTS)].sum(axis=1)
    labels = [f"{row.model} ({row.cache})" for row in rows.itertuples()]
    left = 0
    for (column, label), color in zip(PARTS.items(), colors):
        share = rows[column] / totals
        axis.barh(labels, share, left=left, color=color, label=label, height=0.7)
        left = left + share
    for i, total in enumerate(totals):
        axis.annotate(f"{total:.0f} ms", (1.01, i), va="center", fontsize=8, annotation_clip=False)
    axis.axvline(0.85, color="black", linestyle=":", linewidth=1)
    axis.annotate("the paper: copies take more than 85 %", (0.845, -0.75), fontsize=8, ha="right", va="center")
    axis.set(xlim=(0, 1), xlabel="share of a token's time (simulated, A100-40GB, PCIe 4.0)")
    axis.invert_yaxis()
    axis.margins(y=0.06)
    figure.legend(loc="outside upper center", ncols=3, fontsize=9)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """The largest share of computing over models and caches, and Mixtral's share of copies."""
    worst = rows.loc[rows["simulated_compute_share"].idxmax()]
    interval = worst[["simulated_compute_share_ci_low", "simulated_compute_share_ci_high"]]
    mixtral = rows[rows["model"] == MIXTRAL].iloc[0]
    return [
        Measured(
            "specter-latency-breakdown/compute-share", float(worst["simulated_compute_share"]),
            *(None if pd.isna(end) else float(end) for end in interval),
            n=None if pd.isna(worst["n_requests"]) else int(worst["n_requests"]), simulated=True,
            note=f"largest: {worst['model']}, {worst['cache']}; all time that is not copying, waiting for an eager decoder's "
                 f"launches included; GPU kernels alone are {worst['simulated_kernels_share']:.1%}",
        ),
        Measured(
            "specter-latency-breakdown/mixtral-memory-share", 1 - float(mixtral["simulated_compute_share"]),
            simulated=True, note="no cache",
        ),
    ]  # fmt: skip
