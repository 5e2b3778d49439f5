"""specter-routing-match: how the draft's routing match is distributed (Specter, routing similarity; MoE-SpeQ).

The draft is the paper's: routed experts in GPTQ INT4, everything else shared. Matches are looked at per instance (one
token in one layer), per layer and per request, under both protocols, beside the one-layer-ahead predictor.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import routing
from specter_lab.measure import fidelity
from specter_lab.measure.capture import capture
from specter_lab.measure.draft import free_running_draft
from specter_lab.measure.fidelity import Fidelity
from specter_lab.measure.lookahead import lookahead_overlap
from specter_lab.models.experts import with_experts
from specter_lab.paths import CACHE

REQUESTS_PER_SET = 200  # five sets: 1000 requests
DRAFT = "gptq-int4"
TEACHER_FORCED, FREE_RUNNING, PREDICTOR = "teacher-forced", "free-running", "one layer ahead"
LEVELS = ("instance", "layer", "request")
BINS = 100  # 1 % wide: per-request means are counted in them


def inputs(context: Context) -> dict[str, str]:
    """Models and texts read, name -> sha256."""
    return routing.inputs(context.models)


def run(context: Context) -> pd.DataFrame:
    """Tidy rows `level, item, quantity, value, n`: means with intervals, and the distributions behind the figure."""
    work = [
        jobs.Job(model, measure, {"model": model, "digest": routing.model_digest(model), "seed": context.seed})
        for model in context.models
    ]
    return pd.DataFrame(jobs.run(context, work))


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` is here to name the weights in the cache key."""
    question = routing.ask(model, REQUESTS_PER_SET, seed)
    source = question.source
    draft = with_experts(source.model, routing.quantized(question, DRAFT, CACHE).banks)
    base = {"model": source.name, "family": routing.family(model)}

    reference = routing.reference_trace(question, CACHE)
    match = fidelity.compare(reference, capture(draft, question.tokens, question.origin(DRAFT)))
    rows = _means(match, TEACHER_FORCED, seed) + _distributions(match)
    tokens = question.tokens.at_least(routing.PREFIX_TOKENS)
    windows = free_running_draft(
        source.model, draft, tokens, question.origin(), question.origin(DRAFT),
        prefix_tokens=routing.PREFIX_TOKENS, depth=routing.DEPTH,
    )  # fmt: skip
    rows += _means(fidelity.compare(windows.target, windows.draft), FREE_RUNNING, seed)
    ahead = lookahead_overlap(source.model, question.tokens)  # [T, L-1]
    rows.append(_mean("overlap", ahead, reference.request_index, PREDICTOR, seed))
    # The predictor says nothing about the first layer; the draft over the same layers is what compares with it.
    rows.append(_mean("overlap after the first layer", match.overlap[:, 1:], match.request_index, TEACHER_FORCED, seed))
    gain = match.overlap[:, 1:] - ahead
    rows.append(_mean("draft minus predictor", gain, match.request_index, PREDICTOR, seed))
    return [base | row for row in rows]


def _mean(quantity: str, values: np.ndarray, request_index: np.ndarray, protocol: str, seed: int) -> dict:
    """Mean of instance values [T, L] with its interval over requests."""
    found = fidelity.mean_interval(values, request_index, seed=seed)
    numbers = {"value": found.estimate, "ci_low": found.low, "ci_high": found.high}
    return {"level": "mean", "item": "all", "quantity": quantity, "protocol": protocol, "n": found.n_requests} | {
        key: round(float(value), 6) for key, value in numbers.items()
    }


def _means(match: Fidelity, protocol: str, seed: int) -> jobs.Rows:
    values = {name: getattr(match, name) for name in fidelity.DEFINITIONS}
    values["same set, other order"] = match.set_match - match.ordered_match
    return [_mean(name, value, match.request_index, protocol, seed) for name, value in values.items()]


def _distributions(match: Fidelity) -> jobs.Rows:
    """Histograms of the overlap per instance and per request (`n` is a count), and the mean of every layer."""
    values, counts = np.unique(match.overlap, return_counts=True)
    instances = [("instance", f"{value:.3f}", value, count) for value, count in zip(values, counts)]
    per_layer = fidelity.per_layer(match.overlap)
    layers = [("layer", str(n), value, len(match.overlap)) for n, value in zip(match.layers, per_layer)]
    per_request = fidelity.per_request(match.overlap, match.request_index)
    counts, edges = np.histogram(per_request, bins=BINS, range=(0, 1))
    requests = [("request", f"{edge:.2f}-{edge + 1 / BINS:.2f}", edge + 0.5 / BINS, count)
                for edge, count in zip(edges, counts) if count]  # fmt: skip
    return [
        {"level": level, "item": item, "quantity": "overlap", "protocol": TEACHER_FORCED,
         "value": round(float(value), 4), "n": int(n)}
        for level, item, value, n in (*instances, *layers, *requests)
    ]  # fmt: skip


def modes(rows: pd.DataFrame) -> pd.Series:
    """The most frequent overlap per (model, level); of layers, which are few, the smallest mean."""

    def mode(part: pd.DataFrame) -> float:
        return float(part["value"].min() if part["level"].iloc[0] == "layer" else part.loc[part["n"].idxmax(), "value"])

    shown = rows[rows["level"].isin(LEVELS)]
    return pd.Series({key: mode(part) for key, part in shown.groupby(["model", "level"], sort=False)})


def plot(rows: pd.DataFrame) -> Figure:
    """Distribution of the overlap per instance, per layer and per request; one row of panels, one colour per model."""
    models = list(dict.fromkeys(rows["model"]))
    colors = dict(zip(models, sns.color_palette("colorblind", len(models))))
    figure, (instance, layer, request) = plt.subplots(1, 3, figsize=(12, 3.6))
    for i, model in enumerate(models):
        mine = rows[rows["model"] == model]
        part = mine[mine["level"] == "instance"].astype({"value": float})
        share = part["n"] / part["n"].sum()
        instance.bar(part["value"] + 0.022 * (i - 1), share, width=0.02, color=colors[model], label=model)
        part = mine[mine["level"] == "layer"]
        layer.plot(part["item"].astype(int), part["value"], marker="o", color=colors[model], label=model)
        part = mine[mine["level"] == "request"]
        request.bar(part["value"], part["n"] / part["n"].sum(), width=1 / BINS, color=colors[model], alpha=0.5, label=model)
    instance.set(title="per instance (token x layer)", xlabel="overlap of the top-k sets", ylabel="share of instances",
                 yscale="log")  # fmt: skip
    layer.set(title="per layer", xlabel="decoder layer", ylabel="mean overlap")
    layer.xaxis.get_major_locator().set_params(integer=True)
    layer.axhline(0.908, color="0.5", linewidth=0.8, linestyle=":")
    layer.annotate("paper, Qwen mean (24 layers)", (layer.get_xlim()[1], 0.9085), fontsize=7, color="0.4", ha="right")
    request.set(title="per request", xlabel="mean overlap of a request", ylabel="share of requests")
    for axis in (instance, layer, request):
        axis.grid(alpha=0.25)
    layer.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 0.08))
    figure.tight_layout()
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """What the rows say about the claims on routing match, model family by model family."""
    means = rows[rows["level"] == "mean"].set_index(["family", "protocol", "quantity"])
    means = means[~means.index.duplicated()]  # one model per family answers the paper's claim: the first named

    def measured(name: str, family: str, quantity: str, protocol: str = TEACHER_FORCED) -> Measured:
        claim = f"specter-routing-match/{name}"
        if (family, protocol, quantity) not in means.index:
            return Measured(claim, None, note=f"no {family} model was measured")
        row = means.loc[(family, protocol, quantity)]
        return Measured(claim, float(row["value"]), float(row["ci_low"]), float(row["ci_high"]), n=int(row["n"]))

    lowest = modes(rows)
    return [
        measured("qwen-mean", "qwen", "overlap"),
        measured("qwen-set-match", "qwen", "set_match"),
        measured("qwen-same-order", "qwen", "ordered_match"),
        measured("qwen-reordered", "qwen", "same set, other order"),
        measured("other-models-mean@phi", "phi", "overlap"),
        measured("other-models-mean@deepseek", "deepseek", "overlap"),
        measured("predictor", "qwen", "overlap", PREDICTOR),
        measured("draft-beats-predictor", "qwen", "draft minus predictor", PREDICTOR),
        Measured("specter-routing-match/modes-above-90", float(lowest.min()), n=len(lowest),
                 note="smallest: {} per {}".format(*lowest.idxmin())),
    ]  # fmt: skip
