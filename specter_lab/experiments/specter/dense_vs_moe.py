"""specter-dense-vs-moe: what speculation gains against the depth K under a memory limit (Specter, motivation).

A dense model reads the same weights however many tokens it verifies, so every accepted token is a saving; an MoE needs
more experts with every token, and those that do not fit are copied again. Measured: acceptance, the experts that each
round uses, finds resident (LRU) and predicts. Simulated with the cost model: the time of a round on the paper's GPU,
with the bytes of the model that a zoo model stands for. Two gains over plain decoding, both in ms/token:

    target side  verification and all its copies; the draft is free and hides nothing. What the claim is about: it tells
                 dense from MoE and depends on no assumption about the draft's speed.
    whole round  the draft is charged and its time hides copies. What a user would see.

The dense control keeps the same *share* of its weights on the GPU as the MoE it stands beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.figure import Figure

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import routing
from specter_lab.experiments.specter.setting import DENSE, priced_as, slots_of
from specter_lab.measure import acceptance
from specter_lab.measure.acceptance import Residency
from specter_lab.measure.bootstrap import resample_counts
from specter_lab.measure.decode import decode
from specter_lab.measure.explosion import used_experts
from specter_lab.measure.speculate import Rounds, speculative_decode
from specter_lab.measure.trace import Trace
from specter_lab.models.experts import with_experts
from specter_lab.models.load import shown_name
from specter_lab.paths import CACHE
from specter_lab.plan.depth import round_costs
from specter_lab.plan.hardware import read_profile

REQUESTS_PER_SET = 5  # five sets: 25 prompts, as in the paper
NEW_TOKENS = 64
DRAFT = "gptq-int4-batched"
PLAIN = 0  # depth of plain decoding
DEPTHS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
HALF = 16
TARGET, WHOLE = "target side", "whole round"
STRAIGHTNESS, SLOPES = "R^2 of the straight line", "slope above K = 16 over slope below"
GAIN = "gain"
ESTIMATE = ["simulated_value", "simulated_value_ci_low", "simulated_value_ci_high"]
PER_ROUND = ("tokens_per_round", "distinct_experts", "resident_experts", "simulated_h2d_gb_per_round")
RESAMPLES = 2000


def inputs(context: Context) -> dict[str, str]:
    """Models and texts read, name -> sha256."""
    return routing.inputs(_models(context))


def run(context: Context) -> pd.DataFrame:
    """Tidy rows: per model, budget and depth what was measured and the simulated gains; the shape of every curve."""
    return routing.rows_per_model(replace(context, models=_models(context)), measure)


def _models(context: Context) -> tuple[str, ...]:
    """The models of the context and the dense control."""
    return tuple(dict.fromkeys((DENSE, *context.models)))


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` is here to name what it reads in the cache key."""
    question = routing.ask(model, REQUESTS_PER_SET, seed)
    target, tokens = question.source.model, question.tokens.at_least(routing.PREFIX_TOKENS)
    draft = with_experts(target, routing.quantized(question, DRAFT, CACHE).banks)
    prompts = torch.stack([ids[: routing.PREFIX_TOKENS] for ids in tokens.ids])  # [R, P]
    plain = decode(target, tokens, question.origin(), prefix_tokens=routing.PREFIX_TOKENS, new_tokens=NEW_TOKENS)
    rounds = {PLAIN: plain_rounds(plain)}
    rounds |= {k: speculative_decode(target, draft, prompts, new_tokens=NEW_TOKENS, depth=k).rounds for k in DEPTHS}
    base = {"model": question.source.name, "priced_as": shown_name(priced_as(model).name)}
    return [
        base | {"budget": budget, "slots_per_layer": round(slots, 3)} | row
        for budget, slots in slots_of(model, routing.family(model)).items()
        for row in _gains(model, rounds, slots, seed)
    ]


def plain_rounds(trace: Trace) -> Rounds:
    """Plain decoding as rounds of depth 0: each verifies one token, and nothing is known in advance."""
    used = used_experts(trace)
    return Rounds(PLAIN, trace.request_index, trace.position, np.zeros_like(trace.position), used, np.zeros_like(used))


def _gains(model: str, rounds: dict[int, Rounds], slots: float, seed: int) -> jobs.Rows:
    """Rows of one model under one budget."""
    priced, profile = priced_as(model), read_profile()
    per_depth, times = [], {TARGET: [], WHOLE: []}  # one item per depth
    for of_depth in rounds.values():
        held = _residency(of_depth, slots)
        costs = round_costs(of_depth, held, priced, profile, slots)
        h2d_gb = np.array([cost.h2d_bytes for cost in costs]) / 1e9
        columns = (np.ones(len(costs)), of_depth.accepted + 1, held.distinct, held.resident, h2d_gb)
        per_depth.append(_per_request(of_depth, columns))  # [R, 5]
        times[TARGET].append(_per_request(of_depth, ([cost.verify_ms + cost.h2d_ms for cost in costs],)))  # [R, 1]
        times[WHOLE].append(_per_request(of_depth, ([cost.total_ms for cost in costs],)))
    requests = len(per_depth[0])
    drawn = np.concatenate([np.ones((1, requests)), resample_counts(requests, RESAMPLES, seed)])  # [1 + B, R]
    sums = np.einsum("br,krm->bkm", drawn, np.stack(per_depth))  # [1 + B, K, 5]; the first row is the estimate
    means = sums[..., 1:] / sums[..., :1]
    rows = []
    for i, depth in enumerate(rounds):
        row = {"depth": depth, "n_requests": requests, "n_rounds": int(sums[0, i, 0])}
        for name, values in zip(PER_ROUND, means[:, i].T):
            row |= _estimate(name, values)
        rows.append(row)
    found = []
    for side, ms in times.items():
        tpot = (drawn @ np.concatenate(ms, axis=1)) / sums[..., 1]  # [1 + B, K]
        gain = tpot[:, :1] / tpot
        for i, row in enumerate(rows):
            found.append(row | {"quantity": GAIN, "side": side, "simulated_tpot_ms": round(float(tpot[0, i]), 3)}
                         | _estimate("simulated_value", gain[:, i]))  # fmt: skip
        for quantity, values in ((STRAIGHTNESS, straightness(gain)), (SLOPES, slope_ratio(gain))):
            row = {"n_requests": requests, "quantity": quantity, "side": side}
            found.append(row | _estimate("simulated_value", values))
    return found


def _per_request(rounds: Rounds, columns: Iterable[Sequence[float]]) -> np.ndarray:
    """Sums over each request's rounds: M columns of [N] -> [R, M]."""
    return np.stack([np.bincount(rounds.request, weights=column) for column in columns], axis=1)


def _residency(rounds: Rounds, slots: float) -> Residency:
    """Experts per round; one expert that is there in part stands for a dense model, all of it known in advance."""
    if slots >= 1:
        return acceptance.residency(rounds, int(slots))
    one = np.ones(len(rounds.accepted))
    return Residency(distinct=one, resident=slots * one, predicted=(1 - slots) * one)


def straightness(gain: np.ndarray) -> np.ndarray:
    """R^2 of the straight line through gains at K = 0 and DEPTHS: [N, K] -> [N]."""
    depth = np.array((PLAIN, *DEPTHS)) - np.mean((PLAIN, *DEPTHS))
    centred = gain - gain.mean(axis=1, keepdims=True)
    return (centred @ depth) ** 2 / ((depth**2).sum() * (centred**2).sum(axis=1))


def slope_ratio(gain: np.ndarray) -> np.ndarray:
    """Slope of the fitted line from K = HALF up over that up to K = HALF: [N, K] -> [N]."""
    depth = np.array((PLAIN, *DEPTHS))
    lower, upper = (np.polyfit(depth[part], gain[:, part].T, 1)[0] for part in (depth <= HALF, depth >= HALF))
    return upper / lower


def _estimate(name: str, values: np.ndarray) -> dict:
    """The first value, with the percentile interval of the others."""
    low, high = np.quantile(values[1:], (0.025, 0.975))
    numbers = {name: values[0], f"{name}_ci_low": low, f"{name}_ci_high": high}
    return {key: round(float(value), 3) for key, value in numbers.items()}


def curve(rows: pd.DataFrame, model: str, side: str, budget: str = "high") -> pd.DataFrame:
    """One gain curve by depth."""
    kept = (rows["model"] == model) & (rows["side"] == side) & (rows["budget"] == budget)
    return rows[kept & (rows["quantity"] == GAIN)].set_index("depth").sort_index()


def plot(rows: pd.DataFrame) -> Figure:
    """A panel per model, one scale for all MoEs: gains of both sides. High budget solid with its interval, low dashed."""
    models = list(dict.fromkeys(rows["model"]))
    columns = min(4, len(models))
    lines = -(-len(models) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.3 * columns, 3.5 * lines), squeeze=False, constrained_layout=True
    )
    colors = dict(zip((TARGET, WHOLE), sns.color_palette("colorblind", 2)))
    gains = rows[rows["quantity"] == GAIN]
    tops = 1.1 * gains.groupby(gains["model"] == DENSE)[ESTIMATE[2]].max()  # by whether it is the dense model
    for axis, model in zip(axes.flat, models):
        for side, color in colors.items():
            for budget, style in (("high", "-"), ("low", "--")):
                points = curve(rows, model, side, budget)
                gain, low, high = points[ESTIMATE].to_numpy().T
                axis.plot(
                    points.index, gain, style, color=color, marker="o", markersize=3, label=f"{side}, {budget} budget"
                )
                if budget == "high":
                    axis.fill_between(points.index, low, high, color=color, alpha=0.15, linewidth=0)
        axis.axhline(1, color="0.6", linewidth=0.8)
        axis.set(title=model, xlabel="depth K", xticks=range(0, 33, 8), ylim=(0, tops[model == DENSE]))
        axis.grid(alpha=0.25)
    for axis in axes.flat[len(models) :]:
        axis.axis("off")
    axes[0, 0].set_ylabel("simulated gain over plain decoding (x)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    plt.close(figure)
    return figure


def shapes(rows: pd.DataFrame, side: str = TARGET) -> pd.DataFrame:
    """The numbers that describe the curves of one side, by quantity, model and budget."""
    found = rows[(rows["side"] == side) & (rows["quantity"] != GAIN)]
    return found.set_index(["quantity", "model", "budget"]).sort_index()


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Of both budgets the worse: the least straight dense curve and the least saturated MoE curve, on the target's side."""
    of_target, of_whole = shapes(rows), shapes(rows, WHOLE)

    def measured(name: str, quantity: str, worst: tuple[str, str], note: str) -> Measured:
        row, whole = (found.loc[(quantity, *worst)] for found in (of_target, of_whole))
        return Measured(
            f"specter-dense-vs-moe/{name}", *map(float, row[ESTIMATE]), n=int(row["n_requests"]), simulated=True,
            note=f"{note}{worst[1]} budget, the worse of the two; draft not charged; of the whole round "
                 f"{whole['simulated_value']:.3g}",
        )  # fmt: skip

    straight, slopes = (of_target.loc[quantity, "simulated_value"] for quantity in (STRAIGHTNESS, SLOPES))
    moe = slopes.drop(DENSE, level="model")
    found = [measured("dense-linear", STRAIGHTNESS, (DENSE, straight[DENSE].idxmin()), "")]
    if len(moe):
        found.append(measured("moe-saturates", SLOPES, moe.idxmax(), f"largest: {moe.idxmax()[0]}; "))
    return found
