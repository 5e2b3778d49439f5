"""specter-ablation: what each part of Specter is worth, by cumulative removal and by Shapley values (Specter, ablation).

Three switches, off by the description of the part:

    PIO  no prefetch while the draft writes: every missing expert is loaded when the verification asks for it
    SIC  the draft shares nothing, so its own copy of all other weights takes slots (`policy.separate_slots`), and its depth
         is not optimised: K = 3, as in the paper's re-creation of a system without SIC. "K kept" leaves K* as it is
    SEE  one launch per expert and operator instead of one per layer, in the draft and in the verification

The paper removes them one after the other (PIO, then SIC, then SEE). What a part is worth depends on what was removed
before it, so all eight combinations are simulated and its Shapley value is the mean over the six orders. Routing is
measured on zoo models; times are simulated for the paper's A100.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, permutations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specter_lab.experiments import jobs
from specter_lab.experiments.claims import share_of_pairs_in_order
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import offload, panels, routing
from specter_lab.experiments.specter.simulated import columns
from specter_lab.experiments.specter.simulation_rows import round_columns, slowdown, tpot_columns
from specter_lab.models.load import shown_name
from specter_lab.plan.policies import find_policy
from specter_lab.plan.policy import Policy, no_prefetch, separate_slots
from specter_lab.plan.simulate import Simulation, simulate

PARTS = ("SIC", "PIO", "SEE")
ALL = frozenset(PARTS)
REMOVED = ("PIO", "SIC", "SEE")  # the paper's order
STEPS = ("full", "without-pio", "without-sic", "without-all")  # as claims.toml names them
UNSHARED_DEPTH = 3  # SpecMoEOff's (Specter, artifact)
SHALLOW, KEPT = "K = 3", "K kept"  # what becomes of the depth without SIC
DEPTHS = {SHALLOW: UNSHARED_DEPTH, KEPT: None}
PAPER_MS = dict(zip(STEPS, (69.2, 83.5, 94.4, 130.4)))  # DeepSeek [S]
VARIANT, FAST, VALUE = "variant", "full, PIO in fast mode", "shapley value"
CLAIMED = "deepseek"
inputs = routing.inputs_of


def run(context: Context) -> pd.DataFrame:
    """Tidy rows: the eight variants and the Shapley values, per model, budget and choice of depth without SIC."""
    return routing.rows_per_model(context, measure)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` is here to name what it reads in the cache key."""
    traffic = offload.traffic(model, seed)
    base = {"model": shown_name(model), "family": routing.family(model), "n_requests": traffic.requests.requests}
    rows = []
    for depth in DEPTHS:
        for budget in ("high", "low"):
            found = {parts: variant(traffic, parts, budget, depth) for parts in subsets()}
            setting = base | {"depth_without_sic": depth, "budget": budget}
            rows += [setting | row for row in _rows(found, seed)]
            if depth == SHALLOW:
                rows.append(
                    setting | {"quantity": FAST} | _variant_row(fast_mode(traffic, budget), found[ALL], ALL, seed)
                )
    return rows


def model_name(model: str) -> str:
    """The name rows carry: without a folder."""
    return model.rstrip("/").rsplit("/", 1)[-1]


def subsets() -> list[frozenset[str]]:
    """The eight combinations of parts, all first and none last."""
    return [frozenset(parts) for size in (3, 2, 1, 0) for parts in combinations(PARTS, size)]


def policy_with(parts: frozenset[str], depth_without_sic: str = SHALLOW) -> Policy:
    """The paper-mode policy with only these parts; SEE is not the policy's but the cost model's (`scene(fused=...)`)."""
    policy = find_policy("specter")
    if "PIO" not in parts:
        policy = replace(policy, prefetch=no_prefetch, barrier=False)
    if "SIC" not in parts:
        policy = replace(policy, slots=separate_slots, depth=DEPTHS[depth_without_sic], shares_weights=False)
    return policy


def variant(traffic: offload.Traffic, parts: frozenset[str], budget: str, depth_without_sic: str) -> Simulation:
    """Specter with only these parts."""
    scene = offload.scene(traffic, budget=budget, fused="SEE" in parts)
    policy = policy_with(parts, depth_without_sic)
    return simulate(traffic.requests, policy, scene, new_tokens=offload.NEW_TOKENS)


def fast_mode(traffic: offload.Traffic, budget: str) -> Simulation:
    """The full system with this project's rolling prefetch in place of the paper's PIO."""
    scene = offload.scene(traffic, budget=budget)
    return simulate(traffic.requests, find_policy("specter-fast"), scene, new_tokens=offload.NEW_TOKENS)


def removals(order: tuple[str, ...] = REMOVED) -> list[frozenset[str]]:
    """What is left after each removal, from everything to nothing."""
    return [ALL - set(order[:count]) for count in range(len(order) + 1)]


def shapley(value: Mapping[frozenset[str], float]) -> dict[str, float]:
    """The mean, over all orders of removal, of what `value` grows by when a part goes. They sum to the whole gain."""
    orders = list(permutations(PARTS))
    gains = dict.fromkeys(PARTS, 0.0)
    for order in orders:
        left = removals(order)
        for part, before, after in zip(order, left, left[1:]):
            gains[part] += (value[after] - value[before]) / len(orders)
    return gains


def _rows(found: Mapping[frozenset[str], Simulation], seed: int) -> jobs.Rows:
    left = removals()
    steps = {parts: STEPS[left.index(parts)] if parts in left else "" for parts in found}
    rows = [
        {"quantity": VARIANT, "step": steps[parts]} | _variant_row(simulation, found[ALL], parts, seed)
        for parts, simulation in found.items()
    ]
    tpot = {parts: row["simulated_tpot_ms"] for parts, row in zip(found, rows)}
    worth = shapley(tpot)
    whole = tpot[frozenset()] - tpot[ALL]
    for part, before, after in zip(REMOVED, left, left[1:]):
        gains = {"simulated_gain_ms": worth[part], "simulated_removal_gain_ms": tpot[after] - tpot[before]}
        shares = {
            "simulated_share": worth[part] / whole,
            "simulated_removal_share": gains["simulated_removal_gain_ms"] / whole,
        }
        numbers = {name: round(float(value), 4) for name, value in (gains | shares).items()}
        rows.append({"quantity": VALUE, "part": part} | numbers)
    return rows


def _variant_row(simulation: Simulation, full: Simulation, parts: frozenset[str], seed: int) -> dict:
    row = {part.lower(): part in parts for part in PARTS} | {"depth": int(simulation.rounds.depth[0])}
    row |= tpot_columns(simulation, offload.NEW_TOKENS, seed) | round_columns(simulation)
    return row | columns("simulated_slowdown", slowdown(simulation, full, offload.NEW_TOKENS, seed))


def chosen(rows: pd.DataFrame, quantity: str, model: str, budget: str = "high", depth: str = SHALLOW) -> pd.DataFrame:
    """The rows of one quantity, model, budget and choice of depth without SIC."""
    kept = (rows["quantity"] == quantity) & (rows["model"] == model) & (rows["budget"] == budget)
    return rows[kept & (rows["depth_without_sic"] == depth)]


def cumulative(rows: pd.DataFrame, model: str, budget: str = "high", depth: str = SHALLOW) -> pd.DataFrame:
    """The paper's four systems, by step."""
    return chosen(rows, VARIANT, model, budget, depth).set_index("step").loc[list(STEPS)]


def plot(rows: pd.DataFrame) -> Figure:
    """Top: cumulative removal, the paper's bars beside ours for its model. Bottom: where the gain comes from."""
    models = _claimed_first(rows)
    figure, axes = plt.subplots(
        2,
        len(models),
        figsize=(0.6 + 2.9 * len(models), 6.2),
        squeeze=False,
        height_ratios=(3, 2),
        constrained_layout=True,
    )
    for place, ((upper, lower), model) in enumerate(zip(axes.T, models)):
        _removal_bars(upper, rows, model)
        _worth_bars(lower, rows, model)
        panels.title(upper, place, f"{model}, high budget")
        panels.title(lower, len(models) + place, "what a part is worth")
    for axis in axes.flat:
        axis.margins(y=0.12)
        axis.tick_params(labelsize=8)
    axes[0, 0].set_ylabel("simulated TPOT (ms/token)", fontsize=9)
    axes[1, 0].set_ylabel("change of TPOT when\nthe part goes (ms/token)", fontsize=9)
    handles = dict(zip(*axes[0, 0].get_legend_handles_labels()[::-1])) | dict(
        zip(*axes[1, 0].get_legend_handles_labels()[::-1])
    )
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
    plt.close(figure)
    return figure


def _removal_bars(axis: Axes, rows: pd.DataFrame, model: str) -> None:
    blue, orange = sns.color_palette("colorblind", 2)
    place, labels = np.arange(len(STEPS)), ["full", "- PIO", "- PIO\n- SIC", "- PIO\n- SIC - SEE"]
    for depth, shift, color in ((SHALLOW, -0.2, blue), (KEPT, 0.2, orange)):
        found = cumulative(rows, model, depth=depth)
        value, low, high = (
            found[["simulated_tpot_ms", "simulated_tpot_ms_ci_low", "simulated_tpot_ms_ci_high"]].to_numpy().T
        )
        axis.bar(place + shift, value, 0.38, yerr=(value - low, high - value), color=color, capsize=2, error_kw={"linewidth": 0.8},
                 label=f"ours, {depth} without SIC")  # fmt: skip
        for x, height, top in zip(place + shift, value, high):
            axis.annotate(f"{height:.0f}", (x, top), ha="center", va="bottom", fontsize=8)
    if _family(rows, model) == CLAIMED:
        axis.plot(place, list(PAPER_MS.values()), "k*", markersize=10, label="the paper (measured)")
    fast = chosen(rows, FAST, model)["simulated_tpot_ms"].iloc[0]
    axis.plot([-0.45, 0.45], [fast, fast], color="black", linewidth=1.2, linestyle=":", label="full, PIO in fast mode")
    axis.errorbar(
        [], [], yerr=[], color="black", capsize=2, linewidth=0.8, linestyle="none", label="95 % interval over requests"
    )
    axis.set_xticks(place, labels)
    axis.grid(axis="y", alpha=0.25)


def _worth_bars(axis: Axes, rows: pd.DataFrame, model: str) -> None:
    green, grey = sns.color_palette("colorblind")[2], "0.7"
    found = chosen(rows, VALUE, model).set_index("part").loc[list(REMOVED)]
    place = np.arange(len(REMOVED))
    axis.bar(place - 0.2, found["simulated_removal_gain_ms"], 0.38, color=grey, label="in the paper's order")
    axis.bar(place + 0.2, found["simulated_gain_ms"], 0.38, color=green, label="Shapley value")
    if _family(rows, model) == CLAIMED:
        steps = np.diff(list(PAPER_MS.values()))
        axis.plot(place - 0.2, steps, "k*", markersize=9)
    axis.axhline(0, color="black", linewidth=0.6)
    axis.set_xticks(place, REMOVED)
    axis.grid(axis="y", alpha=0.25)


def _family(rows: pd.DataFrame, model: str) -> str:
    return rows.loc[rows["model"] == model, "family"].iloc[0]


def _claimed_first(rows: pd.DataFrame) -> list[str]:
    models = list(dict.fromkeys(rows["model"]))
    return sorted(models, key=lambda model: _family(rows, model) != CLAIMED)


def claims(rows: pd.DataFrame) -> list[Measured]:
    """The paper's DeepSeek numbers at the high budget, without SIC at K = 3; the value with K kept is named beside it."""
    prefix, models = "specter-ablation/", rows.loc[rows["family"] == CLAIMED, "model"]
    if models.empty:
        names = [f"tpot@{step}" for step in STEPS] + [f"slowdown@{step}" for step in STEPS[1:]]
        names += [f"gain-share@{part.lower()}" for part in PARTS] + ["removal-order"]
        return [Measured(prefix + name, None, note="no deepseek model was measured") for name in names]
    model = models.iloc[0]
    found, kept = (cumulative(rows, model, depth=depth) for depth in (SHALLOW, KEPT))
    n = int(found["n_requests"].iloc[0])

    def measured(name: str, step: str, column: str) -> Measured:
        ends = (column, f"{column}_ci_low", f"{column}_ci_high")
        note = f"with K kept {kept.loc[step, column]:.3g}"
        return Measured(prefix + name, *(float(found.loc[step, end]) for end in ends), n=n, simulated=True, note=note)

    listed = [measured(f"tpot@{step}", step, "simulated_tpot_ms") for step in STEPS]
    listed += [measured(f"slowdown@{step}", step, "simulated_slowdown") for step in STEPS[1:]]
    worth = chosen(rows, VALUE, model).set_index("part")
    for part in PARTS:
        row = worth.loc[part]
        listed.append(Measured(f"{prefix}gain-share@{part.lower()}", float(row["simulated_removal_share"]), n=n, simulated=True,
                               note=f"Shapley {row['simulated_share']:.0%}"))  # fmt: skip
    order, other = (share_of_pairs_in_order(table["simulated_tpot_ms"].tolist()) for table in (found, kept))
    listed.append(Measured(f"{prefix}removal-order", order, n=n, simulated=True, note=f"with K kept {other:.0%}"))
    return listed
