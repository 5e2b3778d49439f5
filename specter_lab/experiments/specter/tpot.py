"""specter-tpot: ms per token of every offloading system, 3 models x 5 prompt sets x 2 budgets (Specter, TPOT).

Simulated times on the paper's GPU, by three definitions of TPOT that do not agree (`plan.depth`): the paper's, which gives
the first burst of up to K + 1 tokens away and so flatters deep drafts; steady; and decode. Beside every TPOT stand what was
measured on the zoo model (acceptance, tokens per round, distinct experts per layer and round) and the bytes per token.

The requests of one prompt set are decoded one after the other, slots staying filled; "all" pools the sets. Policies
marked lossy change the output, which these times do not show. Transformers and vLLM are closed forms (`layer_systems`).
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from specter_lab.experiments import jobs
from specter_lab.experiments.claims import share_of_pairs_in_order
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import offload, routing, simulated
from specter_lab.experiments.specter.layer_systems import LAYER_SYSTEMS
from specter_lab.experiments.specter.setting import BUDGETS, slots_of
from specter_lab.experiments.specter.simulation_rows import per_request
from specter_lab.experiments.specter.tpot_figure import ALL_SETS, IN_ORDER, NAMES, PAPER, TPOT, by_cell, plot
from specter_lab.measure.bootstrap import ratio_interval, resample_counts
from specter_lab.models.load import shown_name
from specter_lab.plan.policy import Scene
from specter_lab.plan.simulate import Simulation, simulate

__all__ = ["claims", "inputs", "plot", "run"]

RESAMPLES = 2000
inputs = routing.inputs_of


def run(context: Context) -> pd.DataFrame:
    """Tidy rows: model, budget, system, prompt set -> simulated TPOT by three definitions, and what stands beside it."""
    return routing.rows_per_model(context, measure)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` is here to name what it reads in the cache key."""
    rows = []
    for policy, traffic in simulated.systems(model, seed):
        for budget in slots_of(model, routing.family(model)):
            scene = offload.scene(traffic, budget=budget)
            by_set = {
                prompt_set: [
                    simulate(traffic.requests, policy, scene, new_tokens=offload.NEW_TOKENS, requests=requests)
                ]
                for prompt_set, requests in simulated.requests_by_set(traffic).items()
            }
            everything = [one for of_set in by_set.values() for one in of_set]
            base = {"budget": budget, "slots_per_layer": int(policy.slots(scene).mean())} | simulated.name(policy)
            rows += [
                base | {"prompt_set": prompt_set} | tpot_row(of_set, scene.layers, seed)
                for prompt_set, of_set in {ALL_SETS: everything, **by_set}.items()
            ]
            if policy.id == "specter":
                rows += layer_offload_rows(model, budget, scene, list(by_set))
    named = {"model": shown_name(model), "family": routing.family(model)}
    return [named | row for row in rows]


def layer_offload_rows(model: str, budget: str, scene: Scene, prompt_sets: list[str]) -> jobs.Rows:
    """Transformers and vLLM, which offload layers and not experts: closed forms, the same for every prompt."""
    limits = BUDGETS.get(routing.family(model))
    if limits is None:
        return []  # slots are known for such a model, a budget in GB is not
    anatomy, profile, context = scene.costs.model, scene.costs.profile, scene.costs.context_tokens
    gb = limits.high_gb if budget == "high" else limits.low_gb
    rows = []
    for system in LAYER_SYSTEMS.values():
        where = (anatomy, profile, int(gb * 1e9), context)
        row = {"budget": budget, "system": system.id, "title": system.title, "lossy": False, "mean_depth": 0,
               "tokens_per_round": 1.0, "distinct_experts_per_layer": anatomy.top_k,
               "simulated_h2d_mb_per_token": round(system.moved_mb(*where), 2)}  # fmt: skip
        row |= {column: round(system.ms(*where), 3) for column in TPOT.values()}
        rows += [row | {"prompt_set": prompt_set} for prompt_set in (ALL_SETS, *prompt_sets)]
    return rows


def tpot_row(simulations: list[Simulation], layers: int, seed: int) -> dict:
    """TPOT by every definition, over the requests of some simulations of one system, and what stands beside it."""
    parts = [per_request(one, offload.NEW_TOKENS) for one in simulations]
    row = {}
    for definition, column in TPOT.items():
        ms, tokens = (
            np.concatenate([getattr(part[definition], name) for part in parts]) for name in ("ms", "tokens")
        )  # [R]
        row |= {"n_requests": len(ms)} | simulated.columns(column, ratio_interval(ms, tokens, seed=seed))
    return row | simulated.per_round(simulations, layers)


def claims(rows: pd.DataFrame) -> list[Measured]:
    """The paper's TPOT at the high budget; ratios and order over the cells of model, budget and prompt set."""
    return [*_reported(rows), *_over_specmoeoff(rows), *_over_transformers(rows), _order(rows)]


def _reported(rows: pd.DataFrame) -> list[Measured]:
    found = []
    pooled = rows[(rows["prompt_set"] == ALL_SETS) & (rows["budget"] == "high")].set_index(["family", "system"])
    for family, values in PAPER.items():
        for name in values:
            claim, cell = f"specter-tpot/{family}@{name}", (family, IN_ORDER[name])
            if cell not in pooled.index:
                found.append(Measured(claim, None, note=f"no simulation of {name} for a {family} model"))
                continue
            row = pooled.loc[[cell]].iloc[0]
            ends = row[[TPOT["paper"], f"{TPOT['paper']}_ci_low", f"{TPOT['paper']}_ci_high"]]
            note = ", ".join(f"{definition} {row[column]:.1f} ms" for definition, column in TPOT.items())
            if pd.isna(row["n_requests"]):
                found.append(
                    Measured(
                        claim, float(row[TPOT["paper"]]), simulated=True, note="closed form, the same for every prompt"
                    )
                )
            else:
                found.append(Measured(claim, *map(float, ends), n=int(row["n_requests"]), simulated=True, note=note))
    return found


def _over_specmoeoff(rows: pd.DataFrame) -> list[Measured]:
    """Over all cells; the interval of the mean is that of resampled cells."""
    cells = by_cell(rows)
    ratios = (cells["specmoeoff"] / cells["specter"]).to_numpy()
    steady, decode = (
        (wide["specmoeoff"] / wide["specter"]).mean() for wide in (by_cell(rows, d) for d in ("steady", "decode"))
    )
    drawn = resample_counts(len(ratios), RESAMPLES, seed=0) @ ratios / len(ratios)
    low, high = np.quantile(drawn, (0.025, 0.975))
    note = f"{len(ratios)} cells; smallest {ratios.min():.2f}; mean of steady {steady:.2f}, of decode {decode:.2f}"
    name = "specter-tpot/speedup-over-specmoeoff"
    return [
        Measured(
            f"{name}@mean", float(ratios.mean()), float(low), float(high), len(ratios), True, f"interval over {note}"
        ),
        Measured(f"{name}@max", float(ratios.max()), n=len(ratios), simulated=True, note=f"of {note}"),
    ]


def _over_transformers(rows: pd.DataFrame) -> list[Measured]:
    pooled = rows[(rows["prompt_set"] == ALL_SETS) & (rows["budget"] == "high")]
    found = []
    for family in PAPER:
        ms = pooled[pooled["family"] == family].drop_duplicates("system").set_index("system")
        claim = f"specter-tpot/speedup-over-transformers@{family}"
        if not {"specter", IN_ORDER["transformers"]} <= set(ms.index):
            found.append(Measured(claim, None, note=f"no simulation of both for a {family} model"))
            continue
        theirs, ours = ms.loc[IN_ORDER["transformers"]], ms.loc["specter"]
        by_definition = {definition: theirs[column] / ours[column] for definition, column in TPOT.items()}
        note = ", ".join(f"{definition} {ratio:.2f}" for definition, ratio in by_definition.items())
        found.append(
            Measured(claim, float(by_definition["paper"]), n=int(ours["n_requests"]), simulated=True, note=note)
        )
    return found


def _order(rows: pd.DataFrame) -> Measured:
    cells = by_cell(rows)
    present = [system for system in IN_ORDER.values() if system in cells]
    share = np.mean([share_of_pairs_in_order(list(row)) for row in cells[present].itertuples(index=False)])
    called = {system: NAMES[name] for name, system in IN_ORDER.items()}
    holds = {
        f"{called[fast]} < {called[slow]}": float((cells[fast] <= cells[slow]).mean())
        for i, fast in enumerate(present)
        for slow in present[i + 1 :]
    }
    note = ", ".join(f"{pair} in {held:.0%} of the cells" for pair, held in holds.items())
    rare = [f"{pair} in {held:.0%}" for pair, held in holds.items() if held < 0.5]
    aside = f"{', '.join(rare)} of the cells" if rare else ""
    return Measured("specter-tpot/systems-in-order", float(share), n=len(cells), simulated=True, note=note, aside=aside)
