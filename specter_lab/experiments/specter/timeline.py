"""specter-timeline: one round on its streams: draft, copies, barrier, verification, roll-back (MoE-SpeQ, figure).

One speculative round per model and mode, with slots warm from the requests before it: a usual one of those in which the
target rejects a drafted token, so that there is something to roll back. Times are simulated for the paper's A100;
the trace lies beside the rows as `trace.json.gz`, which Perfetto opens.
"""

from __future__ import annotations

import gzip
import json

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import offload, routing
from specter_lab.experiments.specter.timeline_figure import draw
from specter_lab.models.load import shown_name
from specter_lab.plan.policies import find_policy
from specter_lab.plan.simulate import Simulation, simulate
from specter_lab.plan.streams import NOBODY, Span, chrome_trace

MODES = {"paper mode": "specter", "fast mode": "specter-fast"}
REQUESTS = (0, 1, 2, 3)  # the first one fills the slots
NEW_TOKENS = 64
ACCEPT = "accept"
TRACE = "trace.json.gz"
EVENTS = ("draft starts", "copies start", "draft ends", "barrier", "verification", "roll-back")
inputs = routing.inputs_of


def run(context: Context) -> pd.DataFrame:
    """Tidy rows: every piece of work of one round, per model and mode, from the round's start."""
    return routing.rows_per_model(context, measure)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` is here to name what it reads in the cache key."""
    traffic = offload.traffic(model, seed)
    base = {"model": shown_name(model), "family": routing.family(model)}
    rows = []
    for mode, policy in MODES.items():
        simulation = simulate(
            traffic.requests,
            find_policy(policy),
            offload.scene(traffic),
            new_tokens=NEW_TOKENS,
            requests=REQUESTS,
            record=True,
        )
        number = shown_round(simulation)
        rows += [base | {"mode": mode, "round": number} | row for row in round_rows(simulation, number)]
    return rows


def shown_round(simulation: Simulation) -> int:
    """The most usual round (by tokens committed) of those after the first request that reject a token; else of all those.

    The first request fills the slots.
    """
    tokens, depth = simulation.rounds.tokens, simulation.rounds.depth
    first = next(iter(simulation.commits.values()))
    candidates = np.arange(len(first), len(tokens))
    rejecting = candidates[tokens[candidates] <= depth[candidates]]
    candidates = rejecting if len(rejecting) else candidates
    return int(candidates[np.abs(tokens[candidates] - tokens.mean()).argmin()])


def round_rows(simulation: Simulation, number: int) -> jobs.Rows:
    """Every piece of work of one recorded round, ms from its start, and its end."""
    rounds = simulation.rounds
    start, end = float(rounds.start_ms[number]), float(rounds.end_ms[number])
    inside = [span for span in simulation.spans if start <= span.start_ms < end]
    used = {(span.layer, span.expert) for span in inside if span.work == "expert"}
    rows = []
    for span in inside:
        rows.append(
            {"stream": span.stream, "work": span.work, "layer": span.layer, "expert": span.expert,
             "computed_alone": (span.layer, span.expert) in used if span.work == "prefetch" else None,
             "simulated_start_ms": round(span.start_ms - start, 4), "simulated_end_ms": round(span.end_ms - start, 4)}
        )  # fmt: skip
    committed, depth = int(rounds.tokens[number]), int(rounds.depth[number])
    at_end = {"simulated_start_ms": round(end - start, 4), "simulated_end_ms": round(end - start, 4)}
    rows.append({"stream": "compute", "work": ACCEPT, "layer": NOBODY, "expert": NOBODY} | at_end
                | {"depth": depth, "committed": committed, "rolled_back": depth + 1 - committed})  # fmt: skip
    return rows


def of_round(rows: pd.DataFrame, model: str, mode: str) -> pd.DataFrame:
    """The rows of one round."""
    return rows[(rows["model"] == model) & (rows["mode"] == mode)]


def events(round_rows: pd.DataFrame) -> dict[str, float]:
    """When each of EVENTS happened, ms from the round's start; those that a round does not have are left out."""
    work = round_rows.groupby("work")
    first, last = work["simulated_start_ms"].min(), work["simulated_end_ms"].max()
    found = {"draft starts": first.get("draft step"), "copies start": first.get("prefetch"), "draft ends": last.get("draft step"),
             "barrier": last.get("prefetch"), "verification": first.get("attention"), "roll-back": last.get(ACCEPT)}  # fmt: skip
    return {name: float(ms) for name, ms in found.items() if ms is not None}


def pairs_in_order(round_rows: pd.DataFrame) -> tuple[int, int]:
    """How many of the pairs of EVENTS follow each other as claimed, and how many pairs there are."""
    found = events(round_rows)
    pairs = [(a, b) for i, a in enumerate(EVENTS) for b in EVENTS[i + 1 :]]
    return sum(a in found and b in found and found[a] <= found[b] for a, b in pairs), len(pairs)


def files(rows: pd.DataFrame) -> dict[str, bytes]:
    """The Chrome trace of all rounds, a process each; equal rows give equal bytes."""
    merged = []
    for process, ((model, mode), found) in enumerate(rows.groupby(["model", "mode"], sort=False)):
        spans = [
            Span(row.stream, row.simulated_start_ms, row.simulated_end_ms, row.work, int(row.layer), int(row.expert))
            for row in found.itertuples()
        ]
        merged.append(
            {"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"{model}, {mode}, SIMULATED"}}
        )
        merged += [event | {"pid": process} for event in chrome_trace(spans)["traceEvents"]]
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": merged}, separators=(",", ":"))
    return {TRACE: gzip.compress(text.encode(), mtime=0)}


def plot(rows: pd.DataFrame) -> Figure:
    """Every round on its streams, and one layer of its verification enlarged."""
    return draw(rows)


def claims(rows: pd.DataFrame) -> list[Measured]:
    """The order of events in paper mode, all models together; fast mode has no barrier and is named beside it."""
    held = {
        mode: np.sum([pairs_in_order(of_round(rows, model, mode)) for model in rows["model"].unique()], axis=0)
        for mode in MODES
    }
    (paper, all_pairs), (fast, fast_pairs) = held.values()
    return [
        Measured("specter-timeline/events-in-order", float(paper / all_pairs), n=int(all_pairs), simulated=True,
                 note=f"paper mode; fast mode, whose copies go on into the verification, {fast / fast_pairs:.0%}")
    ]  # fmt: skip
