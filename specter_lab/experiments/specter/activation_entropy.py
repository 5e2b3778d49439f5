"""specter-activation-entropy: which experts a workload uses, and how evenly (MoE-SpeQ, activation heat map).

If activation is near uniform, no fixed set of experts is worth keeping resident, and only prediction helps. Counts
come from the unquantised model; their entropy is compared with what a router drawing at random would show on the same
number of tokens, because entropy of counts is biased downwards.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from specter_lab.errors import UserError
from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import routing
from specter_lab.measure.entropy import activation_counts, layer_entropy, normalized_entropy, uniform_router_entropy
from specter_lab.measure.prompts import PROMPT_SETS
from specter_lab.paths import CACHE

REQUESTS_PER_SET = 200  # five sets: 1000 requests
inputs = routing.inputs_of


def run(context: Context) -> pd.DataFrame:
    """Rows per model and layer: one per expert over all requests (entropy repeats), and one per prompt set."""
    return routing.rows_per_model(context, measure)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model."""
    question = routing.ask(model, REQUESTS_PER_SET, seed)
    if question.source.num_experts < 2:
        raise UserError(f"{model} has one expert per layer, so nothing is chosen: give a model with several experts")
    trace = routing.reference_trace(question, CACHE)
    counts = activation_counts(trace)  # [R, L, E]
    set_of_request = np.array([request.prompt_set for request in question.tokens.requests])  # [R]
    interval = layer_entropy(trace, seed=seed)
    rows = []
    for name in ("all", *PROMPT_SETS):
        chosen = counts if name == "all" else counts[set_of_request == name]
        used = chosen.sum(axis=0)  # [L, E]
        num_tokens = int(used[0].sum()) // trace.top_k
        entropy = normalized_entropy(used)  # [L]
        uniform = uniform_router_entropy(num_tokens, trace.num_experts, trace.top_k)
        for i, layer in enumerate(trace.layers):
            of_layer = {
                "model": question.source.name, "prompt_set": name, "layer": layer,
                "normalized_entropy": round(float(entropy[i]), 5), "uniform_router_entropy": round(uniform, 5),
                "n_requests": len(chosen), "n_tokens": num_tokens,
            }  # fmt: skip
            if name == "all":
                of_layer |= {"entropy_ci_low": round(float(interval.low[i]), 5),
                             "entropy_ci_high": round(float(interval.high[i]), 5)}  # fmt: skip
            if name == "all":
                rows += [of_layer | {"expert": e, "activations": int(n)} for e, n in enumerate(used[i])]
            else:
                rows.append(of_layer)
    return rows


def per_layer(rows: pd.DataFrame, prompt_set: str = "all") -> pd.DataFrame:
    """One row per model and layer."""
    return rows[rows["prompt_set"] == prompt_set].drop_duplicates(["model", "layer"])


def plot(rows: pd.DataFrame) -> Figure:
    """Heat map of expert use per model, and the entropy of every layer below it."""
    models = list(dict.fromkeys(rows["model"]))
    figure, axes = plt.subplots(
        2, len(models), figsize=(4.2 * len(models), 5), squeeze=False, height_ratios=(3, 2), constrained_layout=True
    )
    colors = dict(zip(PROMPT_SETS, sns.color_palette("colorblind", len(PROMPT_SETS))))
    lowest = rows["normalized_entropy"].min()
    for column, model in enumerate(models):
        mine = rows[rows["model"] == model]
        counts = mine[mine["prompt_set"] == "all"].pivot(index="layer", columns="expert", values="activations")
        load = counts.div(counts.mean(axis=1), axis=0)  # 1 = fair share
        last = column == len(models) - 1
        sns.heatmap(
            load, ax=axes[0, column], cmap="vlag", center=1, vmin=0, vmax=2, cbar=last,
            cbar_kws={"label": "use / fair share"}, xticklabels=10 if load.shape[1] > 20 else 2,
        )  # fmt: skip
        axes[0, column].set(title=model, xlabel="expert", ylabel="decoder layer" if column == 0 else "")
        axis = axes[1, column]
        for name, color in colors.items():
            part = per_layer(mine, name)
            axis.plot(part["layer"], part["normalized_entropy"], color=color, linewidth=1, label=name)
        part = per_layer(mine)
        axis.plot(part["layer"], part["normalized_entropy"], color="black", marker="o", label="all requests")
        axis.plot(part["layer"], part["uniform_router_entropy"], color="0.5", linestyle=":", label="uniform router")
        axis.set(xlabel="decoder layer", ylim=(lowest - 0.02, 1.005), ylabel="entropy / log E" if column == 0 else "")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.25)
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=8)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Mean and smallest layer entropy over all models."""
    layers = per_layer(rows)
    values = layers[["normalized_entropy", "entropy_ci_low", "entropy_ci_high"]]
    smallest = layers.loc[layers["normalized_entropy"].idxmin()]
    return [
        Measured(
            "specter-activation-entropy/mean-near-maximum", *map(float, values.mean()),
            n=int(layers["n_requests"].min()), note="interval: ends averaged over models and layers",
        ),
        Measured(
            "specter-activation-entropy/every-layer-near-maximum", *map(float, smallest[values.columns]),
            n=int(smallest["n_requests"]), note=f"smallest: {smallest['model']}, layer {smallest['layer']}",
        ),
    ]  # fmt: skip
