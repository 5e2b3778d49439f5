"""specter-io-hiding: which share of the time that copies take is hidden behind computing (Specter, I/O hiding).

Hidden is what the compute stream does not wait for: 1 - stall / busy time of the link, summed over all rounds. Hidden and
exposed milliseconds are given per round as well, because a share says nothing about size: Phi's reported 2089 ms are about
one round of K = 16, and only moving fewer bytes makes it shorter.

Times are simulated on the paper's GPU; what each round copies follows from the routing measured on a zoo model.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specter_lab.experiments import jobs
from specter_lab.experiments.claims import share_of_pairs_in_order
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import offload, routing, simulated
from specter_lab.experiments.specter.setting import slots_of
from specter_lab.measure.bootstrap import ratio_interval
from specter_lab.models.load import shown_name
from specter_lab.plan.simulate import Simulation, simulate

SYSTEMS = ("specter", "specter-fast", "specmoeoff", "sp-e", "sp-l")  # those that prefetch while they draft
PAPER = {"deepseek": 0.555, "qwen": 0.605, "phi": 0.224}  # Specter [S]: family -> share hidden
PAPER_PHI_MS = {"total": 2089.2, "exposed": 1621.3}
HIDDEN = "simulated_hidden_share"
PARTS = {  # of a round on the compute stream
    "simulated_draft_ms": "draft", "simulated_exposed_ms": "waiting for copies", "simulated_verify_ms": "verification",
}  # fmt: skip
inputs = routing.inputs_of


def run(context: Context) -> pd.DataFrame:
    """Tidy rows: model, budget, system -> simulated hidden share, and the milliseconds of a round."""
    return routing.rows_per_model(context, measure)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` is here to name what it reads in the cache key."""
    named = {"model": shown_name(model), "family": routing.family(model)}
    rows = []
    for policy, traffic in simulated.systems(model, seed, SYSTEMS):
        for budget in slots_of(model, routing.family(model)):
            scene = offload.scene(traffic, budget=budget)
            simulation = simulate(traffic.requests, policy, scene, new_tokens=offload.NEW_TOKENS)
            base = {"budget": budget, "slots_per_layer": int(policy.slots(scene).mean())} | simulated.name(policy)
            rows.append(named | base | hiding_row(simulation, scene.layers, seed))
    return rows


def hiding_row(simulation: Simulation, layers: int, seed: int) -> dict:
    """Hidden share with its interval over requests, and the mean round."""
    rounds = simulation.rounds
    request = np.repeat(np.arange(len(simulation.commits)), [len(ends) for ends in simulation.commits.values()])  # [N]
    stall, copies = (np.bincount(request, weights=ms) for ms in (rounds.stall_ms, rounds.h2d_ms))  # [R]
    draft_ms, round_ms = rounds.drafted_ms - rounds.start_ms, rounds.end_ms - rounds.start_ms
    per_round = {
        "simulated_h2d_ms": rounds.h2d_ms,
        "simulated_exposed_ms": rounds.stall_ms,
        "simulated_draft_ms": draft_ms,
        "simulated_verify_ms": round_ms - draft_ms - rounds.stall_ms,
        "simulated_round_ms": round_ms,
        "simulated_h2d_gb": rounds.h2d_bytes / 1e9,
    }
    row = {"n_requests": len(stall)} | simulated.columns(HIDDEN, ratio_interval(copies - stall, copies, seed=seed), 4)
    row |= {name: round(float(values.mean()), 3) for name, values in per_round.items()}
    return row | simulated.per_round([simulation], layers)


def plot(rows: pd.DataFrame) -> Figure:
    """Left: hidden share by model, budget and system, with the paper's. Others: one round on both streams, per model."""
    models = list(dict.fromkeys(rows["model"]))
    figure, axes = plt.subplots(
        1, 1 + len(models), figsize=(4.4 + 3.5 * len(models), 4.1), width_ratios=[1.35, *[1] * len(models)], constrained_layout=True
    )  # fmt: skip
    _shares(axes[0], rows, models)
    for axis, model in zip(axes[1:], models):
        _round(axis, rows[(rows["model"] == model) & (rows["budget"] == "high")])
    for axis in axes[2:]:
        axis.set_yticklabels([])
    handles = {label: bar for axis in axes[1:] for bar, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower right", ncols=len(handles), fontsize=8)
    plt.close(figure)
    return figure


def _shares(axis: Axes, rows: pd.DataFrame, models: list[str]) -> None:
    systems = [system for system in SYSTEMS if system in set(rows["system"])]
    colors = dict(zip(systems, sns.color_palette("colorblind", len(systems))))
    titles = simulated.titles(rows)
    for i, model in enumerate(models):
        for j, system in enumerate(systems):
            for budget, shift in (("high", -0.04), ("low", 0.04)):
                row = rows[(rows["model"] == model) & (rows["system"] == system) & (rows["budget"] == budget)].iloc[0]
                ends = np.abs(row[[f"{HIDDEN}_ci_low", f"{HIDDEN}_ci_high"]].astype(float) - row[HIDDEN])
                axis.errorbar(
                    i + 0.16 * (j - (len(systems) - 1) / 2) + shift, row[HIDDEN], yerr=ends.to_numpy()[:, None], fmt="o",
                    color=colors[system], mfc=colors[system] if budget == "high" else "white", markersize=5, capsize=2,
                    label=titles[system] if i == 0 and budget == "high" else None,
                )  # fmt: skip
        reported = PAPER.get(rows.loc[rows["model"] == model, "family"].iloc[0])
        if reported is not None:
            axis.plot([i - 0.42, i + 0.42], [reported] * 2, color="black", linestyle=":", linewidth=1.2)
            axis.annotate(f"paper {reported:.1%}", (i + 0.42, reported), fontsize=7, ha="right", va="bottom")
    axis.set_xticks(range(len(models)), models)
    axis.set(ylim=(0, 0.78), ylabel="share of copy time hidden, simulated", title="a  Hidden (● high budget, ○ low)")
    axis.legend(fontsize=7, loc="upper left", ncols=2)
    axis.grid(alpha=0.25, axis="y")


def _round(axis: Axes, rows: pd.DataFrame) -> None:
    """One mean round per system: what compute does above, what the link does below."""
    rows = rows.set_index("system").reindex([s for s in SYSTEMS if s in set(rows["system"])])
    blue, red, green, gray = (*sns.color_palette("colorblind")[:1], *sns.color_palette("colorblind")[3:4],
                              *sns.color_palette("colorblind")[2:3], "0.55")  # fmt: skip
    place, left = np.arange(len(rows)), 0
    for (column, label), color in zip(PARTS.items(), (blue, red, green)):
        axis.barh(place - 0.19, rows[column], left=left, height=0.36, color=color, label=label)
        left = left + rows[column]
    axis.barh(place + 0.19, rows["simulated_h2d_ms"], height=0.36, color=gray, label="copies")
    axis.set_yticks(place, rows.index, fontsize=8)
    axis.set_ylim(len(rows) - 0.45, -0.55)
    family = rows["family"].iloc[0]
    if family == "phi":
        for (name, ms), side in zip(PAPER_PHI_MS.items(), ("left", "right")):
            axis.axvline(ms, color="black", linestyle=":", linewidth=1)
            axis.annotate(f" paper, {name}:\n {ms:.0f} ms ", (ms, len(rows) - 0.45), fontsize=6.5, ha=side, va="top")
        axis.set_ylim(len(rows) + 0.1, -0.55)
    axis.set(title=rows["model"].iloc[0], xlabel="ms per round, simulated, high budget")
    axis.grid(alpha=0.25, axis="x")


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Specter in paper mode at the high budget; fast mode in the note."""
    high = rows[rows["budget"] == "high"].drop_duplicates(["family", "system"]).set_index(["family", "system"])
    found, shares = [], {}
    for family in PAPER:
        claim = f"specter-io-hiding/hidden-share@{family}"
        if (family, "specter") not in high.index:
            found.append(Measured(claim, None, note=f"no {family} model was simulated"))
            continue
        row, fast = high.loc[(family, "specter")], high.loc[(family, "specter-fast")]
        ends = row[[HIDDEN, f"{HIDDEN}_ci_low", f"{HIDDEN}_ci_high"]]
        shares[family] = float(row[HIDDEN])
        note = f"{row['simulated_exposed_ms']:.0f} of {row['simulated_h2d_ms']:.0f} ms per round exposed; fast mode {fast[HIDDEN]:.1%}"
        found.append(Measured(claim, *map(float, ends), n=int(row["n_requests"]), simulated=True, note=note))
    return [*found, *_phi(high), _order(shares)]


def _phi(high: pd.DataFrame) -> list[Measured]:
    names = {"total": "simulated_h2d_ms", "exposed": "simulated_exposed_ms"}
    if ("phi", "specter") not in high.index:
        return [
            Measured(f"specter-io-hiding/phi-h2d@{name}", None, note="no phi model was simulated") for name in names
        ]
    row = high.loc[("phi", "specter")]
    note = f"a mean round of K = {row['mean_depth']:.0f}; {row['simulated_h2d_gb']:.1f} GB"
    return [
        Measured(
            f"specter-io-hiding/phi-h2d@{name}", float(row[column]), n=int(row["n_rounds"]), simulated=True, note=note
        )
        for name, column in names.items()
    ]


def _order(shares: dict[str, float]) -> Measured:
    claim, order = "specter-io-hiding/phi-hides-least", ("phi", "deepseek", "qwen")
    if set(shares) != set(order):
        return Measured(claim, None, note="not all three families were simulated")
    note = ", ".join(f"{family} {shares[family]:.1%}" for family in order)
    return Measured(claim, share_of_pairs_in_order([shares[f] for f in order]), n=3, simulated=True, note=note)
