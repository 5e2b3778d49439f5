"""specter-batch: TPOT, throughput and expert working set for 1 to 32 requests in lockstep (Specter, batch figures).

Two clocks, because the paper's batch figures do not close: at B = 32 its throughput equals 32 / TPOT for Transformers and
MO-SM, and only 0.49 of that for Specter.

    per request  a request's own TPOT, by the paper's formula; it stops when the request has its tokens
    batch        from the end of the prefill to the last token of the slowest request, over N: B / throughput

They agree when every request commits one token a step. Speculating requests finish at different rounds, and with the last
one's clock the batch is paid for. Simulated on the paper's GPU at the high budget, 32 requests of five prompt sets in turn.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import offload, routing, simulated
from specter_lab.experiments.specter.batch_figure import (
    BATCH_CLOCK,
    REQUEST_CLOCK,
    THROUGHPUT,
    WORKING_SET,
    curve,
    plot,
)
from specter_lab.experiments.specter.layer_systems import LAYER_SYSTEMS, TRANSFORMERS
from specter_lab.experiments.specter.offload import Traffic
from specter_lab.experiments.specter.setting import BUDGETS
from specter_lab.experiments.specter.simulation_rows import per_request
from specter_lab.models.load import shown_name
from specter_lab.plan import serve
from specter_lab.plan.policy import Policy, Scene
from specter_lab.plan.simulate import simulate

__all__ = ["claims", "inputs", "plot", "run"]

SYSTEMS = ("specter", "specter-fast", "specmoeoff", "lru-s", "lru")
BATCHES = (1, 2, 4, 8, 16, 32)
CALLED = {
    "specter": "specter",
    "specmoeoff": "specmoeoff",
    "mo-sm": "lru-s",
    "transformers": "transformers",
}  # claim -> id
inputs = routing.inputs_of


def run(context: Context) -> pd.DataFrame:
    """Tidy rows: model, system, batch -> simulated TPOT by both clocks, throughput, working set."""
    return routing.rows_per_model(context, measure)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` is here to name what it reads in the cache key."""
    named = {"model": shown_name(model), "family": routing.family(model)}
    rows = []
    for policy, traffic in simulated.systems(model, seed, SYSTEMS):
        for batch in BATCHES:
            scene = offload.scene(traffic, budget="high")
            row = batch_row(policy, traffic, scene, batch)
            rows.append(named | simulated.name(policy) | row)
            if policy.id == "lru" and named["family"] in BUDGETS:
                budget_bytes = int(BUDGETS[named["family"]].high_gb * 1e9)
                rows.append(named | layer_offload_row(scene, batch, row[WORKING_SET], budget_bytes))
    return rows


def layer_offload_row(scene: Scene, batch: int, distinct_experts: float, budget_bytes: int) -> dict:
    """Transformers: what it moves for one token serves the whole batch; computing is charged for `batch` tokens."""
    costs, system = scene.costs, LAYER_SYSTEMS[TRANSFORMERS]
    context = batch * costs.context_tokens
    ms = system.ms(costs.model, costs.profile, budget_bytes, context, tokens=batch, distinct_experts=distinct_experts)
    clocks = (REQUEST_CLOCK, "simulated_tpot_steady_ms", "simulated_tpot_decode_ms", BATCH_CLOCK)
    row = {"system": system.id, "title": system.title, "lossy": False, "batch": batch}
    row |= {clock: round(ms, 3) for clock in clocks} | {THROUGHPUT: round(batch / ms * 1e3, 3)}
    return row | {WORKING_SET: distinct_experts, "tokens_per_round": float(batch)}


def batch_row(policy: Policy, traffic: Traffic, scene: Scene, batch: int) -> dict:
    """One system with `batch` requests at a time; the same requests for every batch."""
    requests, new_tokens = in_turn(traffic)[: max(BATCHES)], offload.NEW_TOKENS
    done = simulate(traffic.requests, policy, scene, new_tokens=new_tokens, batch=batch, requests=requests)
    ends = {request: commits[-1][0] for request, commits in done.commits.items()}
    groups = [requests[first : first + batch] for first in range(0, len(requests), batch)]
    wall_ms = sum(max(ends[request] for request in group) - done.began_ms[group[0]] for group in groups)
    tpot = {name: of.ms.sum() / of.tokens.sum() for name, of in per_request(done, new_tokens).items()}
    rounds, counts = len(done.rounds.depth), done.hits.counts
    return {
        "batch": batch, "n_requests": len(requests), "n_rounds": rounds,
        REQUEST_CLOCK: round(float(tpot["paper"]), 3),
        "simulated_tpot_steady_ms": round(float(tpot["steady"]), 3),
        "simulated_tpot_decode_ms": round(float(tpot["decode"]), 3),
        BATCH_CLOCK: round(wall_ms / len(groups) / new_tokens, 3),
        THROUGHPUT: round(len(requests) * new_tokens / wall_ms * 1e3, 3),
        "simulated_ttft_ms": round(float(np.mean(list(done.ttft_ms.values()))), 1),
        WORKING_SET: round(int(counts[serve.NEEDED]) / rounds / scene.layers, 3),
        "tokens_per_round": round(float(done.rounds.tokens.mean()), 3),
        "simulated_h2d_gb_per_round": round(float(done.rounds.h2d_bytes.mean() / 1e9), 3),
    }  # fmt: skip


def in_turn(traffic: Traffic) -> list[int]:
    """The simulated requests, one of every prompt set after the other, so that every batch is mixed."""
    return [request for turn in zip(*simulated.requests_by_set(traffic).values(), strict=True) for request in turn]


def claims(rows: pd.DataFrame) -> list[Measured]:
    """The largest batch, and what changes on the way there."""
    deepseek, qwen = (simulated.model_of(rows, family) for family in ("deepseek", "qwen"))
    found = []
    for name, column in (("tpot", REQUEST_CLOCK), ("throughput", THROUGHPUT)):
        other = BATCH_CLOCK if name == "tpot" else REQUEST_CLOCK
        for system in CALLED:
            found.append(_at_most(rows, deepseek, system, f"{name}@{system}", column, other))
    found += _against_specmoeoff(rows, deepseek)
    found += [_inflation(rows, model, f"tpot-inflation@{of}") for of, model in (("deepseek", deepseek), ("qwen", qwen))]
    return [*found, _at_most(rows, qwen, "specter", "qwen-tpot", REQUEST_CLOCK, BATCH_CLOCK), _working_set(rows, qwen)]


def _measured(name: str, value: float | None, note: str) -> Measured:
    n = None if value is None else max(BATCHES)
    return Measured(f"specter-batch/{name}", None if value is None else float(value), n=n, simulated=True, note=note)


def _at_most(rows: pd.DataFrame, model: str | None, system: str, name: str, column: str, other: str) -> Measured:
    """One number at the largest batch; another column in the note."""
    points = curve(rows, model, CALLED[system])
    if points.empty:
        return _measured(name, None, f"{system} was not simulated for that model")
    last = points.iloc[-1]
    return _measured(name, last[column], f"{other.removeprefix('simulated_')} {last[other]:.1f}, B / throughput "
                                         f"{last[BATCH_CLOCK] / last[REQUEST_CLOCK]:.2f} of TPOT")  # fmt: skip


def _against_specmoeoff(rows: pd.DataFrame, model: str | None) -> list[Measured]:
    ours, theirs = (curve(rows, model, system) for system in ("specter", "specmoeoff"))
    names = ("tpot-over-specmoeoff", "throughput-over-specmoeoff", "peak-throughput-ratio")
    if ours.empty or theirs.empty:
        return [_measured(name, None, "no deepseek model was simulated") for name in names]
    slower, faster = theirs[REQUEST_CLOCK] / ours[REQUEST_CLOCK], ours[THROUGHPUT] / theirs[THROUGHPUT]
    course = ", ".join(f"{ratio:.2f} at {batch}" for batch, ratio in faster.items())
    return [
        _measured(names[0], slower.iloc[-1], f"by the batch's clock {faster.iloc[-1]:.2f}"),
        _measured(names[1], faster.iloc[-1], f"by the requests' clock {slower.iloc[-1]:.2f}"),
        _measured(names[2], faster.max(), f"ours peaks at B = {faster.idxmax()}: {course}"),
    ]


def _inflation(rows: pd.DataFrame, model: str | None, name: str) -> Measured:
    points = curve(rows, model, "specter")
    if points.empty:
        return _measured(name, None, "no such model was simulated")
    by_clock = {column: points[column].iloc[-1] / points[column].iloc[0] for column in (REQUEST_CLOCK, BATCH_CLOCK)}
    return _measured(name, by_clock[REQUEST_CLOCK], f"by the batch's clock {by_clock[BATCH_CLOCK]:.2f}")


def _working_set(rows: pd.DataFrame, model: str | None) -> Measured:
    """What grows 1.52x in the paper's figure is not said; taken as the working set from B = 1 to the largest."""
    points = curve(rows, model, "specter")
    if points.empty:
        return _measured("figure-16", None, "no qwen model was simulated")
    first, last = points[WORKING_SET].iloc[0], points[WORKING_SET].iloc[-1]
    note = f"read as the growth of the working set from B = 1 to {points.index[-1]}: {first:.1f} to {last:.1f} experts"
    return _measured("figure-16", last / first, note)
