"""specter-io-hiding: which share of the time that copies take is hidden behind computing (Specter, I/O hiding).

Hidden is what the compute stream does not wait for: 1 - stall / busy time of the link, summed over all rounds. Hidden and
exposed milliseconds are given per round as well, because a share says nothing about size: Phi's reported 2089 ms are about
one round of K = 16, and only moving fewer bytes makes it shorter.

Times are simulated on the paper's GPU; what each round copies follows from the routing measured on a zoo model.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from specter_lab.experiments import jobs
from specter_lab.experiments.claims import share_of_pairs_in_order
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import offload, routing, simulated
from specter_lab.experiments.specter.io_hiding_figure import HIDDEN, PAPER, SYSTEMS, plot
from specter_lab.experiments.specter.setting import slots_of
from specter_lab.measure.bootstrap import ratio_interval
from specter_lab.models.load import shown_name
from specter_lab.plan.simulate import Simulation, simulate

__all__ = ["claims", "inputs", "plot", "run"]

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
