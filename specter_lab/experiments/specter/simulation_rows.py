"""One simulation of all requests as columns of a row: TPOT by definition with intervals, and where a round's time goes."""

from __future__ import annotations

import numpy as np

from specter_lab.experiments.specter.simulated import columns
from specter_lab.measure.bootstrap import Interval, ratio_interval
from specter_lab.plan.depth import Tpot
from specter_lab.plan.serve import NEEDED, PREFETCHED, PREFETCHED_USED
from specter_lab.plan.simulate import Simulation

PAPER, STEADY, DECODE = "paper", "steady", "decode"  # definitions of TPOT, as `plan.depth` has them


def per_request(simulation: Simulation, new_tokens: int) -> dict[str, Tpot]:
    """Simulated milliseconds and tokens of every request, by definition of TPOT; requests in the order they ran."""
    parts: dict[str, list[tuple[float, float]]] = {PAPER: [], STEADY: [], DECODE: []}
    for request, commits in simulation.commits.items():
        ends, tokens = zip(*commits)
        after_first, whole = ends[-1] - ends[0], ends[-1] - simulation.began_ms[request]
        parts[PAPER].append((after_first, new_tokens - 1))
        parts[STEADY].append((after_first, sum(tokens[1:])) if len(ends) > 1 else (whole, sum(tokens)))
        parts[DECODE].append((whole, new_tokens))
    return {name: Tpot(*np.array(pairs).T) for name, pairs in parts.items()}


def tpot_columns(simulation: Simulation, new_tokens: int, seed: int) -> dict[str, float]:
    """Simulated TPOT, ms/token: the paper's definition with its 95 % interval over requests, the others beside it."""
    found = per_request(simulation, new_tokens)
    paper = ratio_interval(found[PAPER].ms, found[PAPER].tokens, seed=seed)
    others = {name: found[name].ms.sum() / found[name].tokens.sum() for name in (STEADY, DECODE)}
    return columns("simulated_tpot_ms", paper) | {
        f"simulated_tpot_{name}_ms": round(float(value), 3) for name, value in others.items()
    }


def round_columns(simulation: Simulation) -> dict[str, float | None]:
    """Means over rounds: what was committed and needed (replayed from the recording), and simulated times and bytes."""
    rounds, counts = simulation.rounds, simulation.hits.counts
    n = len(rounds.depth)
    fetched = int(counts[PREFETCHED])
    numbers = {
        "n_rounds": n,
        "tokens_per_round": rounds.tokens.mean(),
        "experts_per_round": counts[NEEDED] / n,
        "simulated_prefetch_used_share": counts[PREFETCHED_USED] / fetched if fetched else None,
        "simulated_draft_ms_per_round": (rounds.drafted_ms - rounds.start_ms).mean(),
        "simulated_stall_ms_per_round": rounds.stall_ms.mean(),
        "simulated_round_ms": (rounds.end_ms - rounds.start_ms).mean(),
        "simulated_h2d_ms_per_round": rounds.h2d_ms.mean(),
        "simulated_h2d_gb_per_round": rounds.h2d_bytes.mean() / 1e9,
        "simulated_hidden_share": simulation.hidden_share,
    }
    return {name: None if value is None else round(float(value), 4) for name, value in numbers.items()}


def slowdown(simulation: Simulation, reference: Simulation, new_tokens: int, seed: int) -> Interval:
    """TPOT (paper's definition) over that of another simulation of the same requests, with its interval over requests."""
    mine, its = (per_request(each, new_tokens)[PAPER] for each in (simulation, reference))
    return ratio_interval(mine.ms, its.ms, seed=seed)
