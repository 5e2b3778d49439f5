"""specter-robustness: TPOT against the precision of the prefetch, and how precise the lookahead is by itself (Specter).

A prefetch that names wrong experts costs bytes and slots, never a token: verification loads what it needs. The real
lookahead's recall and precision are measured on the zoo's windows. Then its plans are spoilt: the draft is given the target's own
routing (precision 1), and a growing share of the planned experts is exchanged for absent ones that the round does not need.
TPOT is simulated for the paper's A100.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import offload, routing
from specter_lab.experiments.specter.dilution import Announced, announced, diluted, perfect
from specter_lab.experiments.specter.robustness_figure import (
    CLAIMED,
    LOOKAHEAD,
    NATURAL,
    PAPER_MS,
    POLICIES,
    RECALL,
    RECALL_DRAFTED,
    TPOT,
    curve,
    lookahead,
    plot,
)
from specter_lab.experiments.specter.simulated import columns
from specter_lab.experiments.specter.simulation_rows import round_columns, slowdown, tpot_columns
from specter_lab.measure.bootstrap import ratio_interval
from specter_lab.models.load import shown_name
from specter_lab.plan.policies import find_policy
from specter_lab.plan.simulate import Simulation, simulate
from specter_lab.plan.workload import Workload

__all__ = ["PAPER_MS", "claims", "inputs", "plot", "run"]

PRECISIONS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.41)
DEFINITIONS = {  # what is divided by what, of `Announced`
    RECALL: ("both", "needed"),
    RECALL_DRAFTED: ("both_by_drafted", "needed_by_drafted"),
    "precision": ("both", "announced"),
    "precision, first K tokens": ("both_by_drafted", "announced"),
}
WORST = 0.41
inputs = routing.inputs_of


def run(context: Context) -> pd.DataFrame:
    """Tidy rows: recall and precision of the lookahead; TPOT, as it is and with diluted plans."""
    return routing.rows_per_model(context, measure)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` is here to name what it reads in the cache key."""
    traffic = offload.traffic(model, seed)
    scene = offload.scene(traffic)
    windows = traffic.requests.windows
    base = {
        "model": shown_name(model),
        "family": routing.family(model),
        "n_requests": windows.requests,
        "depth": scene.depth,
    }
    found = announced(windows, scene.depth, offload.NEW_TOKENS)
    rows = [base | {"quantity": LOOKAHEAD, "definition": name} | _share(found, name, seed) for name in DEFINITIONS]
    ideal = Workload(perfect(windows), traffic.requests.layers)
    for policy in map(find_policy, POLICIES):
        of_policy = base | {"policy": policy.id}
        as_is = simulate(traffic.requests, policy, scene, new_tokens=offload.NEW_TOKENS)
        rows.append(of_policy | {"quantity": NATURAL} | _row(as_is, as_is, as_is, seed))
        right = None
        for precision in PRECISIONS:
            spoilt = diluted(policy, precision, seed)
            simulation = simulate(ideal, spoilt, scene, new_tokens=offload.NEW_TOKENS)
            right = right or simulation
            row = {"quantity": TPOT, "precision": precision} | _row(simulation, right, as_is, seed)
            rows.append(of_policy | row)
    return rows


def _row(simulation: Simulation, right: Simulation, as_is: Simulation, seed: int) -> dict:
    """TPOT and slow-down, and the share of requests whose rounds commit other numbers of tokens than with the lookahead as it is."""
    tokens, expected = (
        [[count for _, count in commits] for commits in each.commits.values()] for each in (simulation, as_is)
    )
    changed = np.mean([ours != theirs for ours, theirs in zip(tokens, expected, strict=True)])
    row = (
        tpot_columns(simulation, offload.NEW_TOKENS, seed)
        | round_columns(simulation)
        | {"requests_changed": float(changed)}
    )
    return row | columns("simulated_slowdown", slowdown(simulation, right, offload.NEW_TOKENS, seed))


def _share(found: Announced, definition: str, seed: int) -> dict:
    part, whole = (getattr(found, name) for name in DEFINITIONS[definition])
    return columns("value", ratio_interval(part, whole, seed=seed))


def claims(rows: pd.DataFrame) -> list[Measured]:
    """TPOT of the paper-mode policy on the DeepSeek model; recall as the mean of the models; tokens over all simulations."""
    prefix, models = "specter-robustness/", rows.loc[rows["family"] == CLAIMED, "model"]
    listed = _tpot_claims(rows, models.iloc[0]) if len(models) else [
        Measured(prefix + name, None, note="no deepseek model was measured")
        for name in ("tpot@1.000", "tpot@0.410", "slowdown")
    ]  # fmt: skip
    simulated = rows[rows["quantity"] == TPOT]
    listed.append(Measured(f"{prefix}no-quality-loss", float(simulated["requests_changed"].max()), n=len(simulated), simulated=True,
                           note="by construction: the replayed tokens do not depend on what is resident"))  # fmt: skip
    table = lookahead(rows).xs(RECALL, level="definition")
    drafted = lookahead(rows).xs(RECALL_DRAFTED, level="definition")["value"].mean()
    ends = (float(table[column].mean()) for column in ("value", "value_ci_low", "value_ci_high"))
    each = ", ".join(f"{model} {value:.3f}" for model, value in table["value"].items())
    listed.append(Measured(f"{prefix}natural-recall", *ends, n=int(table["n_requests"].sum()),
                           note=f"mean of the models ({each}) over K + 1 tokens; over the K drafted ones {drafted:.3f}"))  # fmt: skip
    return listed


def _tpot_claims(rows: pd.DataFrame, model: str) -> list[Measured]:
    found, fast = (curve(rows, model, policy) for policy in POLICIES)
    n = int(found["n_requests"].iloc[0])

    def measured(name: str, precision: float, column: str) -> Measured:
        ends = (column, f"{column}_ci_low", f"{column}_ci_high")
        note = f"fast mode {fast.loc[precision, column]:.3g}"
        return Measured(
            f"specter-robustness/{name}",
            *(float(found.loc[precision, end]) for end in ends),
            n=n,
            simulated=True,
            note=note,
        )

    return [
        measured("tpot@1.000", 1.0, "simulated_tpot_ms"),
        measured("tpot@0.410", WORST, "simulated_tpot_ms"),
        measured("slowdown", WORST, "simulated_slowdown"),
    ]
