"""specter-expert-explosion: distinct experts per layer against the window K, and what repeats between windows.

Verifying K drafted tokens in one pass needs the union of their experts. The union grows with K, but slower than under
uniform routing, because neighbouring tokens use the same experts; the same locality is what a cache lives on. Prefill
(the prompts' own text) and decode (the model's continuation, greedy and sampled) are told apart: small models repeat
themselves when they decode greedily, and repeated text needs few experts.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import routing
from specter_lab.measure.bootstrap import Interval, ratio_interval
from specter_lab.measure.explosion import distinct_experts, independent_routing, uniform_routing
from specter_lab.measure.locality import reuse_distances, uniform_reuse, window_reuse
from specter_lab.measure.prompts import PROMPT_SETS
from specter_lab.measure.trace import Trace
from specter_lab.paths import CACHE

REQUESTS_PER_SET = 25  # five sets: 125 requests
MAX_WINDOW = 32
SET_WINDOWS = (1, 2, 4, 8, 16, 32)  # of the curves per prompt set
REUSE_WINDOWS = (4, 8, 16)
DISTANCES = (1, 2, 4, 8, 16, 32, 64)  # tokens
PREFILL, GREEDY, SAMPLED = "prefill", "decode, greedy", "decode, sampled"
TEMPERATURES = {GREEDY: 0.0, SAMPLED: 1.0}
DISTINCT, DISTANCE = "distinct experts per layer", "share reused within"
REUSED = {1: "share reused from the window before", 2: "share reused from the two windows before"}
PAPER = {"deepseek": {1: 6.0, 16: 31.7}}  # Specter [S]: family -> window -> distinct experts per layer
inputs = routing.inputs_of


def run(context: Context) -> pd.DataFrame:
    """Tidy rows `quantity, tokens, value` with interval, and what uniform and independent routing would give."""
    return routing.rows_per_model(context, measure)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` is here to name what it reads in the cache key."""
    question = routing.ask(model, REQUESTS_PER_SET, seed)
    set_of = {request.id: request.prompt_set for request in question.tokens.requests}
    traces = {PREFILL: routing.reference_trace(question, CACHE)}
    traces |= {name: routing.decode_trace(question, CACHE, temperature) for name, temperature in TEMPERATURES.items()}
    base = {"model": question.source.name, "family": routing.family(model)}
    rows = []
    for phase, trace in traces.items():
        sets = np.array([set_of[request] for request in trace.request_ids])  # [R]
        found = _explosion_rows(trace, sets, seed) + _locality_rows(trace, seed)
        rows += [base | {"phase": phase} | row for row in found]
    return rows


def _explosion_rows(trace: Trace, sets: np.ndarray, seed: int) -> jobs.Rows:
    counted = distinct_experts(trace, MAX_WINDOW)
    rows = []
    for prompt_set in ("all", *PROMPT_SETS):
        chosen = np.flatnonzero(np.isin(sets, PROMPT_SETS if prompt_set == "all" else prompt_set))
        for window in range(1, MAX_WINDOW + 1) if prompt_set == "all" else SET_WINDOWS:
            interval = counted.interval(window, chosen, seed=seed)
            row = _row(DISTINCT, window, interval) | {"prompt_set": prompt_set}
            row |= {"n_windows": int(counted.windows[window - 1, chosen].sum())}
            if prompt_set == "all":
                row |= {"uniform_routing": round(uniform_routing(trace.num_experts, trace.top_k, window), 4),
                        "independent_routing": round(independent_routing(trace, window), 4)}  # fmt: skip
            rows.append(row)
    return rows


def _locality_rows(trace: Trace, seed: int) -> jobs.Rows:
    rows = []
    for lookback, quantity in REUSED.items():
        for window in REUSE_WINDOWS:
            interval = window_reuse(trace, window, lookback).interval(seed=seed)
            uniform = uniform_reuse(trace.num_experts, trace.top_k, lookback * window)
            rows.append(_row(quantity, window, interval) | {"uniform_routing": round(uniform, 4)})
    distances = reuse_distances(trace).reshape(trace.num_tokens, -1)  # [T, L * k], 0 for a first use
    uses = np.bincount(trace.request_index) * distances.shape[1]  # [R]
    for tokens in DISTANCES:
        near = ((distances > 0) & (distances <= tokens)).sum(axis=1)  # [T]
        near = np.bincount(trace.request_index, weights=near)  # [R]
        interval = ratio_interval(near[uses > 0], uses[uses > 0], seed=seed)
        uniform = uniform_reuse(trace.num_experts, trace.top_k, tokens)
        rows.append(_row(DISTANCE, tokens, interval) | {"uniform_routing": round(uniform, 4)})
    return [row | {"prompt_set": "all"} for row in rows]


def _row(quantity: str, tokens: int, interval: Interval) -> dict:
    numbers = {"value": interval.estimate, "ci_low": interval.low, "ci_high": interval.high}
    return {"quantity": quantity, "tokens": tokens, "n_requests": interval.n_requests} | {
        key: round(float(value), 4) for key, value in numbers.items()
    }


def curve(rows: pd.DataFrame, model: str, phase: str, quantity: str = DISTINCT) -> pd.DataFrame:
    """One curve over all prompt sets: the rows of a model, phase and quantity, by number of tokens."""
    kept = (rows["model"] == model) & (rows["phase"] == phase) & (rows["quantity"] == quantity)
    return rows[kept & (rows["prompt_set"] == "all")].set_index("tokens").sort_index()


def plot(rows: pd.DataFrame) -> Figure:
    """Top: distinct experts against K, with uniform routing and the paper's points. Bottom: reuse distance."""
    models = list(dict.fromkeys(rows["model"]))
    figure, axes = plt.subplots(
        2, len(models), figsize=(4.2 * len(models), 6.4), squeeze=False, height_ratios=(3, 2), constrained_layout=True
    )
    blue, orange, _, red = sns.color_palette("colorblind", 4)
    colors = {PREFILL: blue, SAMPLED: red, GREEDY: orange}
    for (upper, lower), model in zip(axes.T, models):
        for phase, color in colors.items():
            style = "--" if phase == SAMPLED else "-"  # lies on the prefill curve
            _line(upper, curve(rows, model, phase), color, style, phase)
            _line(lower, curve(rows, model, phase, DISTANCE), color, style, phase)
        uniform = curve(rows, model, PREFILL)
        upper.plot(uniform.index, uniform["uniform_routing"], color="0.4", linestyle=":", label="uniform routing")
        uniform = curve(rows, model, PREFILL, DISTANCE)
        lower.plot(uniform.index, uniform["uniform_routing"], color="0.4", linestyle=":")
        points = PAPER.get(rows.loc[rows["model"] == model, "family"].iloc[0])
        if points:
            upper.scatter(*zip(*points.items()), marker="*", s=130, color="black", zorder=3, label="paper (DeepSeek)")
        upper.set(title=model, xlabel="consecutive tokens K", xticks=(1, 4, 8, 16, 24, 32), ylim=(0, None))
        lower.set(xlabel="tokens since the layer last used the expert", xscale="log", ylim=(0, 1))
        lower.set_xticks(DISTANCES, labels=DISTANCES)
        lower.minorticks_off()
        for axis in (upper, lower):
            axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel("distinct experts per layer")
    axes[1, 0].set_ylabel("share of expert uses\nfound again within")
    handles = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=9)
    plt.close(figure)
    return figure


def _line(axis: Axes, points: pd.DataFrame, color: tuple, style: str, label: str) -> None:
    axis.plot(points.index, points["value"], style, color=color, label=label, linewidth=1.6)
    axis.fill_between(points.index, points["ci_low"], points["ci_high"], color=color, alpha=0.2, linewidth=0)


def claims(rows: pd.DataFrame) -> list[Measured]:
    """The paper's DeepSeek numbers, from the sampled continuation; the greedy one is named beside it."""
    names = [f"specter-expert-explosion/{name}" for name in
             ("distinct-experts@1", "distinct-experts@16", "growth", "below-uniform")]  # fmt: skip
    models = rows.loc[rows["family"] == "deepseek", "model"]
    if models.empty:
        return [Measured(name, None, note="no deepseek model was measured") for name in names]
    sampled, greedy = (curve(rows, models.iloc[0], phase) for phase in (SAMPLED, GREEDY))
    n = int(sampled.loc[16, "n_requests"])

    def measured(name: str, window: int, scale: float = 1.0) -> Measured:
        value, low, high = sampled.loc[window, ["value", "ci_low", "ci_high"]].astype(float) / scale
        if window == 1:
            return Measured(name, value, n=n, note="the model's top-k: one token always uses as many")
        note = f"sampled continuation; greedy {greedy.loc[window, 'value'] / scale:.3g}"
        return Measured(name, value, low, high, n=n, note=note)

    scales = (1.0, 1.0, sampled.loc[1, "value"], sampled.loc[16, "uniform_routing"])
    return [measured(name, window, scale) for name, window, scale in zip(names, (1, 16, 16, 16), scales)]
