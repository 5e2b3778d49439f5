"""specter-hit-rate: how often an expert is there when it is asked for, by six definitions of "how often" (Specter, hit rate).

The paper gives DeepSeek at 16, 24 and 32 GB. Slots per layer behind those: 16 at 24 GB (artifact). LRU-S is LRU with 16 slots
more, and LRU-S at 24 GB has the hit rate of LRU at 32 GB (76.56 %), so 32 GB are 32 slots. At 16 GB six, the only number
reported; the artifact's own low budget, 18 GB, has four, so the two do not lie on one line.

Claims are judged on "token-weighted": one access is one token's use of one expert, found ready or not. It was chosen before
any run, because it is what an LRU hit rate of plain decoding counts, and the paper puts its windows in one table with that.
Beside every rate stands its ceiling (`hit_ceilings`): what no policy of its kind could exceed with the same slots.
Two numbers are no hit rates: "slots used", the share of all slots whose expert the verification uses, and "prefetch
precision", the share of prefetched copies that lie there when they are needed. Both fall when there are more slots, as the
paper's numbers for Specter do; a hit rate rises.

Routing is measured on a zoo model and stretched to the original's layers; times, and so what is ready, are simulated.
Every request is simulated by itself, from empty slots that its own prompt fills.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import offload, routing, simulated
from specter_lab.experiments.specter.hit_ceilings import ceilings, demand_ceiling
from specter_lab.experiments.specter.hit_rate_figure import (
    GB,
    JUDGED,
    PRECISION,
    SLOTS_USED,
    definitions,
    plot,
)
from specter_lab.experiments.specter.offload import Traffic
from specter_lab.experiments.specter.setting import slots_of
from specter_lab.measure.bootstrap import resample_counts
from specter_lab.models.load import shown_name
from specter_lab.plan import serve
from specter_lab.plan.hits import Hits
from specter_lab.plan.policy import Policy, Scene
from specter_lab.plan.simulate import simulate

__all__ = ["claims", "inputs", "plot", "run"]

SLOTS = {
    "deepseek": {"16 GB": 6, "24 GB": 16, "32 GB": 32}
}  # of the paper's figure: family -> budget -> slots per layer
RESAMPLES = 1000
IN_THE_CLAIM = ("lru", "lru-s", "sp-e", "sp-l", "specter")
inputs = routing.inputs_of


def run(context: Context) -> pd.DataFrame:
    """Tidy rows: model, budget, system, definition -> simulated hit rate with interval, and its ceiling."""
    return routing.rows_per_model(context, measure)


def budgets(model: str) -> dict[str, int]:
    """Budget -> slots per layer: the figure's for DeepSeek, the artifact's two for the others."""
    family = routing.family(model)
    if family in SLOTS:
        return SLOTS[family]
    slots = slots_of(model, family)
    return {f"{limit} budget": int(slots[limit]) for limit in ("low", "high")}


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` is here to name what it reads in the cache key."""
    rows = []
    demand = demand_ceiling(offload.traffic(model, seed).requests, offload.NEW_TOKENS)
    for policy, traffic in simulated.systems(model, seed):
        for budget, slots in budgets(model).items():
            scene = offload.scene(traffic, slots=slots)
            base = {"model": shown_name(model), "family": routing.family(model), "budget": budget}
            base |= {"slots_per_layer": slots} | simulated.name(policy)
            rows += [base | row for row in hit_rows(policy, traffic, scene, demand, seed)]
    return rows


def hit_rows(
    policy: Policy, traffic: Traffic, scene: Scene, demand: Callable[[np.ndarray], float], seed: int
) -> jobs.Rows:
    """One row per definition, for one system at one budget; `demand` is the ceiling without a draft."""
    runs = [
        simulate(traffic.requests, policy, scene, new_tokens=offload.NEW_TOKENS, requests=[request])
        for request in range(traffic.requests.requests)
    ]
    counts = np.stack([one.hits.counts for one in runs])  # [R, NUM_COUNTS]
    others = np.array(
        [(one.hits.draft_uses, one.hits.draft_uses_ready, len(one.rounds.depth)) for one in runs]
    )  # [R, 3]
    slots = int(policy.slots(scene).sum())
    drawn = np.concatenate([np.ones((1, len(runs))), resample_counts(len(runs), RESAMPLES, seed)])  # [1 + B, R]
    values = pd.DataFrame([
        rates(replace(runs[0].hits, counts=summed, draft_uses=uses, draft_uses_ready=ready), passes * slots)
        for summed, (uses, ready, passes) in zip(drawn @ counts, drawn @ others)
    ])  # fmt: skip
    ceiling = ceilings(traffic.requests, policy, scene, demand, offload.NEW_TOKENS)
    rows = []
    for definition, column in values.items():
        if np.isfinite(column[0]):
            low, high = np.nanquantile(column[1:], (0.025, 0.975))
            numbers = {"simulated_hit_rate": column[0], "simulated_hit_rate_ci_low": low,
                       "simulated_hit_rate_ci_high": high, "ceiling": ceiling.get(definition)}  # fmt: skip
            row = {"definition": definition, "n_requests": len(runs)}
            rows.append(row | {key: None if n is None else round(float(n), 5) for key, n in numbers.items()})
    return rows


def rates(hits: Hits, slots: float) -> dict[str, float]:
    """The six hit rates, and what is none; `slots`: those of all layers, summed over passes."""
    ready, prefetched, used = hits.counts[[serve.NEEDED_READY, serve.PREFETCHED, serve.PREFETCHED_USED]].tolist()
    return hits.rates() | {SLOTS_USED: ready / slots, PRECISION: used / prefetched if prefetched else float("nan")}


def claims(rows: pd.DataFrame) -> list[Measured]:
    """DeepSeek's hit rates by the definition chosen beforehand; the others are in the note."""
    model = simulated.model_of(rows, "deepseek")
    cells = [(system, gb) for system in IN_THE_CLAIM for gb in GB]
    if model is None:
        names = [*(f"{system}@{gb}" for system, gb in cells), "specter-best"]
        return [Measured(f"specter-hit-rate/{name}", None, note="no deepseek model was measured") for name in names]
    tables = {(system, gb): definitions(rows, model, system, f"{gb} GB") for system, gb in cells}
    found = [_measured(f"{system}@{gb}", tables[system, gb]) for system, gb in cells]
    judged = {cell: table.loc[JUDGED, "simulated_hit_rate"] for cell, table in tables.items()}
    others = [cell for cell in cells if cell[0] != "specter"]
    above = [f"{system} at {gb} GB" for system, gb in others if judged[system, gb] > judged["specter", gb]]
    note = f"higher: {', '.join(above)}" if above else ""
    share = 1 - len(above) / len(others)
    best = Measured("specter-hit-rate/specter-best", share, n=len(others), simulated=True, note=note, aside=note)
    return [*found, best]


def _measured(name: str, table: pd.DataFrame) -> Measured:
    numbers = ["simulated_hit_rate", "simulated_hit_rate_ci_low", "simulated_hit_rate_ci_high"]
    others = "; ".join(f"{d} {rate:.1%}" for d, rate in table["simulated_hit_rate"].items() if d != JUDGED)
    return Measured(
        f"specter-hit-rate/{name}", *map(float, table.loc[JUDGED, numbers]), n=int(table.loc[JUDGED, "n_requests"]),
        simulated=True, note=f"{JUDGED}; by other definitions: {others}",
    )  # fmt: skip
