"""specter-routing-match: how the draft's routing match is distributed (Specter, routing similarity; MoE-SpeQ).

The draft is the paper's: routed experts in GPTQ INT4, everything else shared. Matches are looked at per instance (one
token in one layer), per layer and per request, beside the one-layer-ahead predictor; means are taken under both protocols.
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
BINS = 500  # 0.2 % wide
inputs = routing.inputs_of


def run(context: Context) -> pd.DataFrame:
    """Tidy rows `level, item, quantity, value, n`: means with intervals, and the distributions behind the figure."""
    return routing.rows_per_model(context, measure)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model."""
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
        prefix_tokens=routing.PREFIX_TOKENS, depth=routing.DEPTH, token_budget=routing.DRAFT_BUDGET,
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
    """Histograms of the overlap (`n` is a count) per instance, per layer of a request and per request; layer means."""
    request_layer = np.stack([fidelity.per_request(layer[:, None], match.request_index) for layer in match.overlap.T])
    levels = {
        "instance": match.overlap,
        "layer": request_layer,  # [L, R]: mean over one request's tokens in one layer
        "request": fidelity.per_request(match.overlap, match.request_index),
    }
    rows = []
    for level, values in levels.items():
        rounded, counts = np.unique(np.round(values * BINS) / BINS, return_counts=True)
        rows += [(level, f"{value:.3f}", "overlap", value, n) for value, n in zip(rounded, counts)]
    for quantity in ("overlap", "set_match"):
        means = fidelity.per_layer(getattr(match, quantity))
        rows += [("layer mean", str(n), quantity, mean, len(match.overlap)) for n, mean in zip(match.layers, means)]
    return [
        {"level": level, "item": item, "quantity": quantity, "protocol": TEACHER_FORCED,
         "value": round(float(value), 4), "n": int(n)}
        for level, item, quantity, value, n in rows
    ]  # fmt: skip


def modes(rows: pd.DataFrame) -> pd.Series:
    """The most frequent overlap per (model, level): middle of the fullest bin."""
    shown = rows[rows["level"].isin(LEVELS)]
    return pd.Series(
        {
            key: float(part.loc[part["n"].idxmax(), "value"])
            for key, part in shown.groupby(["model", "level"], sort=False)
        }
    )


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
        for quantity, style in (("overlap", "-"), ("set_match", "--")):
            part = mine[(mine["level"] == "layer mean") & (mine["quantity"] == quantity)]
            label = model if quantity == "overlap" else None
            layer.plot(part["item"].astype(int), part["value"], style, marker="o", color=colors[model], label=label)
        part = mine[mine["level"] == "request"]
        request.bar(
            part["value"], part["n"] / part["n"].sum(), width=1 / BINS, color=colors[model], alpha=0.5, label=model
        )
    instance.set(title="per instance (token x layer)", xlabel="overlap of the top-k sets", ylabel="share of instances",
                 yscale="log")  # fmt: skip
    layer.set(title="per layer (dashed: same set)", xlabel="decoder layer", ylabel="mean match")
    layer.xaxis.get_major_locator().set_params(integer=True)
    layer.axhline(0.908, color="0.5", linewidth=0.8, linestyle=":")
    layer.annotate("paper, Qwen mean over 24 layers", (layer.get_xlim()[1], 0.909), fontsize=7, color="0.4", ha="right")
    request.set(title="per request", xlabel="mean overlap of a request", ylabel="share of requests")
    for axis in (instance, layer, request):
        axis.grid(alpha=0.25)
    layer.legend(fontsize=8, loc="lower left")
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
