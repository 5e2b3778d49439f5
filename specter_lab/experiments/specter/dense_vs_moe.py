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

from pathlib import Path

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
RESAMPLES = 2000


def inputs(context: Context) -> dict[str, str]:
    """Models and texts read, name -> sha256."""
    return routing.inputs(_models(context))


def run(context: Context) -> pd.DataFrame:
    """Tidy rows: per model, budget and depth what was measured and the simulated gains; and the shape of every curve."""
    work = [
        jobs.Job(model, measure, {"model": model, "digest": routing.model_digest(model), "seed": context.seed})
        for model in _models(context)
    ]
    return pd.DataFrame(jobs.run(context, work))


def _models(context: Context) -> tuple[str, ...]:
    """The models of the context and the dense control."""
    return tuple(dict.fromkeys((DENSE, *context.models)))


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` is here to name the weights in the cache key."""
    question = routing.ask(model, REQUESTS_PER_SET, seed)
    target, tokens = question.source.model, question.tokens.at_least(routing.PREFIX_TOKENS)
    draft = with_experts(target, routing.quantized(question, DRAFT, CACHE).banks)
    prompts = torch.stack([ids[: routing.PREFIX_TOKENS] for ids in tokens.ids])  # [R, P]
    plain = decode(target, tokens, question.origin(), prefix_tokens=routing.PREFIX_TOKENS, new_tokens=NEW_TOKENS)
    rounds = {PLAIN: plain_rounds(plain)}
    rounds |= {k: speculative_decode(target, draft, prompts, new_tokens=NEW_TOKENS, depth=k).rounds for k in DEPTHS}
    base = {"model": Path(model).name if Path(model).is_dir() else model, "priced_as": priced_as(model).name}
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
    tokens, rows = [], []
    times: dict[str, list[np.ndarray]] = {TARGET: [], WHOLE: []}  # per depth [R], ms of each request
    for depth, of_depth in rounds.items():
        held = _residency(of_depth, slots)
        costs = round_costs(of_depth, held, priced, profile, slots)
        tokens.append(np.bincount(of_depth.request, weights=of_depth.accepted + 1))
        for side, ms in ((TARGET, [c.verify_ms + c.h2d_ms for c in costs]), (WHOLE, [c.total_ms for c in costs])):
            times[side].append(np.bincount(of_depth.request, weights=ms))
        rows.append({
            "depth": depth, "n_rounds": len(of_depth.accepted), "n_requests": len(tokens[-1]),
            "tokens_per_round": round(float((of_depth.accepted + 1).mean()), 3),
            "distinct_experts": round(float(held.distinct.mean()), 3),
            "resident_experts": round(float(held.resident.mean()), 3),
            "simulated_h2d_gb_per_round": round(float(np.mean([c.h2d_bytes for c in costs])) / 1e9, 3),
        })  # fmt: skip
    drawn = np.concatenate([np.ones((1, len(tokens[0]))), resample_counts(len(tokens[0]), RESAMPLES, seed)])  # [1 + B, R]
    committed = drawn @ np.stack(tokens, axis=1)  # [1 + B, K]
    found = []
    for side, ms in times.items():
        tpot = (drawn @ np.stack(ms, axis=1)) / committed  # [1 + B, K]; the first row is the estimate
        gain = tpot[:, :1] / tpot
        found += [
            row | {"quantity": "gain", "side": side, "simulated_tpot_ms": round(float(tpot[0, i]), 3)} | _estimate(gain[:, i])
            for i, row in enumerate(rows)
        ]
        shapes = {STRAIGHTNESS: straightness(gain), SLOPES: slope_ratio(gain)}
        found += [{"quantity": name, "side": side, "n_requests": len(tokens[0])} | _estimate(values)
                  for name, values in shapes.items()]  # fmt: skip
    return found


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


def _estimate(values: np.ndarray) -> dict:
    """The first value, with the percentile interval of the others."""
    low, high = np.quantile(values[1:], (0.025, 0.975))
    numbers = {"simulated_value": values[0], "ci_low": low, "ci_high": high}
    return {name: round(float(value), 4) for name, value in numbers.items()}


def curve(rows: pd.DataFrame, model: str, side: str, budget: str = "high") -> pd.DataFrame:
    """One gain curve by depth."""
    kept = (rows["model"] == model) & (rows["side"] == side) & (rows["budget"] == budget)
    return rows[kept & (rows["quantity"] == "gain")].set_index("depth").sort_index()


def plot(rows: pd.DataFrame) -> Figure:
    """Left: gain on the target's side, dense and MoE. Right: gain of the whole round. High solid, low dashed."""
    models = list(dict.fromkeys(rows["model"]))
    colors = dict(zip(models, ["black", *sns.color_palette("colorblind", len(models) - 1)]))
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    panels = ((TARGET, models, "target side: draft free, nothing hidden"),
              (TARGET, models[1:], "target side, MoE only"), (WHOLE, models, "whole round: draft charged, copies hidden"))
    for axis, (side, shown, title) in zip(axes, panels):
        for model in shown:
            for budget, style in (("high", "-"), ("low", "--")):
                points = curve(rows, model, side, budget)
                axis.plot(points.index, points["simulated_value"], style, color=colors[model], marker="o", markersize=3,
                          label=model if budget == "high" else None)  # fmt: skip
                axis.fill_between(points.index, points["ci_low"], points["ci_high"], color=colors[model], alpha=0.12,
                                  linewidth=0)  # fmt: skip
        axis.set(title=title, xlabel="depth K", xticks=range(0, 33, 4))
        axis.axhline(1, color="0.6", linewidth=0.8)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("simulated gain over plain decoding (x)")
    axes[0].legend(fontsize=8, title="solid: high budget, dashed: low", title_fontsize=8)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """The shape of the dense curve, and of the least saturated MoE curve, on the target's side at the high budget."""
    shapes = rows[(rows["budget"] == "high") & (rows["quantity"] != "gain")].set_index(["quantity", "side", "model"])

    def measured(name: str, quantity: str, model: str, note: str) -> Measured:
        row, whole = (shapes.loc[(quantity, side, model)] for side in (TARGET, WHOLE))
        return Measured(
            f"specter-dense-vs-moe/{name}", *map(float, row[["simulated_value", "ci_low", "ci_high"]]),
            n=int(row["n_requests"]), simulated=True,
            note=f"{note}draft not charged; of the whole round {whole['simulated_value']:.3g}",
        )  # fmt: skip

    moe = shapes.loc[(SLOPES, TARGET)].drop(DENSE)["simulated_value"]
    return [
        measured("dense-linear", STRAIGHTNESS, DENSE, ""),
        measured("moe-saturates", SLOPES, moe.idxmax(), f"largest: {moe.idxmax()}; "),
    ]
