"""specter-beyond: what ideas beyond the paper are worth where the link limits, each alone and as the planner combines them.

Not in the paper: this project's ideas (DESIGN.md section 3), at the paper's budgets, on a machine with PCIe 5. Routing and
acceptance are measured on zoo models and priced as their originals; times are simulated. What specter-engine measured of the
same systems stands beside them in the notebook.

    fast mode            rolling prefetch, no barrier, the fixed depth of the paper: what the others are compared with
    online depth         the same, its depth learned while it decodes, 0 included
    uneven slots         the same, slots divided over the layers by what they were worth on other requests
    kernels load misses  the same, what is missing goes into a slot instead of being read through: it is there the next time
    residual transport   the same, copies carry what the draft's INT4 codes do not say; misses are read as they are
    CPU shares           the host's cores compute the misses that they end sooner than the link
    no draft             the draft's memory turned into slots, plain decoding
    planner's choice     the quickest on other requests of all systems, at all depths
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from specter_lab.compress.residual import size
from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import offload, panels, routing
from specter_lab.experiments.specter.simulated import columns, model_of, per_round
from specter_lab.experiments.specter.simulation_rows import DECODE, per_request
from specter_lab.measure.bootstrap import ratio_interval
from specter_lab.models.experts import read_banks
from specter_lab.models.load import load, shown_name
from specter_lab.plan.choose import DEPTHS, choose
from specter_lab.plan.depth_control import FixedDepth, OnlineDepth
from specter_lab.plan.policies import find_policy
from specter_lab.plan.policy import Scene
from specter_lab.plan.simulate import Simulation, simulate
from specter_lab.plan.step_costs import Transport

PROFILE = "h200-pcie5"
RESTORE_GB_S = 316  # measured on an H200: engine.kernels.bench_residual
BUDGETS = ("high", "low")
PAPER_MODE, FAST, ONLINE, RESIDUAL = "paper mode", "fast mode", "online depth", "residual transport"
PLANNED = "planner's choice"
SWITCH, FIXED = "switch", "fixed depth"  # what a row is about
SYSTEMS = {
    PAPER_MODE: "specter", FAST: "specter-fast", ONLINE: "specter-fast", "uneven slots": "specter-uneven",
    "kernels load misses": "specter-admit", RESIDUAL: "specter-fast", "CPU shares": "specter-shared", "no draft": "lru-s",
    "no draft, uneven slots": "adapmoe", "no draft, kernels load": "lru-admit", "no draft, CPU shares": "lru-shared",
}  # fmt: skip
MS, RATIO = "simulated_ms_per_token", "simulated_over_fast_mode"
inputs = routing.inputs_of


@dataclass(frozen=True)
class Setting:
    """One model at one budget."""

    scene: Scene
    traffic: offload.Traffic

    def run(
        self, policy: str, depth: int | None = None, *, online: bool = False, transport: Transport = Transport()
    ) -> Simulation:
        """All requests under a policy; None: its own depth."""
        scene = replace(self.scene, costs=replace(self.scene.costs, transport=transport))
        control = OnlineDepth(offload.MAX_DEPTH) if online else None if depth is None else FixedDepth(depth)
        how = {"new_tokens": offload.NEW_TOKENS, "control": control}
        return simulate(self.traffic.requests, find_policy(policy), scene, **how)


def run(context: Context) -> pd.DataFrame:
    """Tidy rows: model, budget, switch or fixed depth -> simulated ms per token, what it moves, how it compares with fast mode."""
    return routing.rows_per_model(context, measure)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` is here to name what it reads in the cache key."""
    traffic = offload.traffic(model, seed)
    transport = Transport(link_bits(model), RESTORE_GB_S)
    rows = []
    for budget in BUDGETS:
        setting = Setting(offload.scene(traffic, budget=budget, profile=PROFILE), traffic)
        found = {
            item: setting.run(policy, online=item == ONLINE, transport=transport if item == RESIDUAL else Transport())
            for item, policy in SYSTEMS.items()
        }
        best, *_ = choose(setting.scene, offload.NEW_TOKENS)
        found[PLANNED] = setting.run(best.policy.id, best.depth)
        systems = SYSTEMS | {PLANNED: best.policy.id}
        base = {
            "model": shown_name(model),
            "family": routing.family(model),
            "budget": budget,
            "link_bits": transport.bits,
        }
        rows += [
            base
            | {"by": SWITCH, "item": item, "system": systems[item]}
            | _row(setting, each, found[FAST], systems[item], seed)
            for item, each in found.items()
        ]
        for depth in (0, 1, *DEPTHS):
            each = setting.run(SYSTEMS[FAST], depth)
            rows.append(base | {"by": FIXED, "item": f"K = {depth}", "system": SYSTEMS[FAST]}
                        | _row(setting, each, found[FAST], SYSTEMS[FAST], seed))  # fmt: skip
    return rows


def link_bits(model: str) -> float:
    """Bits per weight that residual transport moves of this model's own experts: measured."""
    weights = (part.bfloat16() for bank in read_banks(load(model).model) for part in (bank.gate, bank.up, bank.down))
    return round(size(weights).bits, 3)


def _row(setting: Setting, found: Simulation, fast: Simulation, system: str, seed: int) -> dict:
    mine, its = (per_request(each, offload.NEW_TOKENS)[DECODE] for each in (found, fast))
    slots = find_policy(system).slots(setting.scene)
    numbers = {"n_requests": len(mine.ms), "slots_fewest": int(slots.min()), "slots_most": int(slots.max())}
    numbers |= columns(MS, ratio_interval(mine.ms, mine.tokens, seed=seed), 4)
    numbers |= columns(RATIO, ratio_interval(mine.ms, its.ms, seed=seed), 4)
    return numbers | per_round([found], setting.scene.layers) | {"hit_rate": round(found.hits.rates()["distinct"], 4)}


def table(rows: pd.DataFrame, by: str = SWITCH) -> pd.DataFrame:
    """Simulated ms per token: switches (rows) by model and budget (columns)."""
    chosen = rows[rows["by"] == by]
    return chosen.pivot_table(index="item", columns=["model", "budget"], values=MS, sort=False)


def plot(rows: pd.DataFrame) -> Figure:
    """Simulated time per token over that of fast mode, every switch alone, a panel per budget."""
    chosen = rows[(rows["by"] == SWITCH) & (rows["item"] != FAST)]
    items, models = list(dict.fromkeys(chosen["item"])), list(dict.fromkeys(rows["model"]))
    figure, axes = plt.subplots(
        1, len(BUDGETS), figsize=(7.6, 0.7 + 0.38 * len(items)), sharey=True, constrained_layout=True
    )
    colors = dict(zip(models, sns.color_palette("colorblind", len(models))))
    shifts = dict(zip(models, np.linspace(-0.24, 0.24, len(models)) if len(models) > 1 else [0.0]))
    for place, (axis, budget) in enumerate(zip(axes, BUDGETS)):
        for model in models:
            part = chosen[(chosen["model"] == model) & (chosen["budget"] == budget)].set_index("item").loc[items]
            value, low, high = (part[name] for name in (RATIO, f"{RATIO}_ci_low", f"{RATIO}_ci_high"))
            at = np.arange(len(items)) + shifts[model]
            axis.errorbar(value, at, xerr=(value - low, high - value), fmt="o", markersize=4, capsize=2, elinewidth=0.8, color=colors[model],
                          label=model)  # fmt: skip
        axis.axvline(1, color="0.4", linewidth=0.8)
        axis.set_xscale("log")
        ticks = [0.5, 0.75, 1, 1.25]
        axis.set_xlim(0.45, 1.4)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel("simulated ms/token over fast mode's", fontsize=9)
        axis.grid(axis="x", alpha=0.25)
        panels.title(axis, place, f"{budget} budget")
    axes[0].set_yticks(range(len(items)), items, fontsize=8.5)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(models), fontsize=8)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """This project's aims; every one is judged by its worst model and budget."""
    cells = rows[rows["by"] == SWITCH].set_index(["model", "budget", "item"])[MS].unstack("item")
    fixed = rows[rows["by"] == FIXED].groupby(["model", "budget"], sort=False)[MS].min()
    bits = rows.groupby("model", sort=False)["link_bits"].first()
    phi = model_of(rows, "phi")
    limited = [cell for cell in cells.index if cell[1] == "low" or cell[0] == phi]

    def worst(name: str, ratio: pd.Series, largest: bool = True) -> Measured:
        model, budget = ratio.idxmax() if largest else ratio.idxmin()
        return Measured(f"specter-beyond/{name}", float(ratio[(model, budget)]), n=len(ratio), simulated=True,
                        note=f"{model}, {budget} budget")  # fmt: skip

    return [
        worst("online-near-best", cells[ONLINE] / fixed),
        worst("uneven-not-slower", cells["uneven slots"] / cells[FAST]),
        worst(
            "planner-near-best",
            cells[PLANNED] / pd.concat([cells.drop(columns=RESIDUAL).min(axis=1), fixed], axis=1).min(axis=1),
        ),
        worst("over-paper-mode", (cells[PAPER_MODE] / cells[PLANNED]).loc[limited], largest=False),
        worst("residual-gain", cells[FAST] / cells[RESIDUAL], largest=False),
        Measured(
            "specter-beyond/residual-bytes",
            float(16 / bits.max()),
            n=len(bits),
            note=f"{bits.idxmax()}, {bits.max():.2f} bits",
        ),
    ]
