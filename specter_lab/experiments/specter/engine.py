"""specter-engine: the engine on a real GPU, beside its baselines, its limits, and the simulator.

Measured: milliseconds per token of every system with the same kernels over the same weights at equal bytes; bytes over the link;
where the time goes; whether the tokens are bitwise those of plain decoding. Simulated: the same rounds, on a profile of the same
machine. What limits a token is the larger of two: computing it with all experts resident, and moving its bytes at the link's rate.
"""

from __future__ import annotations

from math import nan

import numpy as np
import pandas as pd

from specter_lab.errors import NotTrained
from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured, need_gpu
from specter_lab.experiments.specter import engine_batch, routing
from specter_lab.experiments.specter.engine_batch import batch_rows
from specter_lab.experiments.specter.engine_figure import plot
from specter_lab.experiments.specter.engine_machine import DRAFT_STEP
from specter_lab.experiments.specter.engine_runs import (
    ALL_SETS,
    ONLINE,
    SHARED,
    exact_rows,
    system_rows,
)
from specter_lab.experiments.specter.engine_tables import CLOSE, fastest_systems, limits, medians
from specter_lab.experiments.specter.peer_llama import LLAMA
from specter_lab.experiments.specter.peers import ACCELERATE, peer_rows
from specter_lab.models.load import resolve

__all__ = ["claims", "inputs", "plot", "run"]


def inputs(context: Context) -> dict[str, str]:
    """As the routing experiments; proxies that were not trained are left out."""
    return routing.inputs(_present(context))


def run(context: Context) -> pd.DataFrame:
    """Tidy rows, by what they are about:

        pass       one pass with everything resident, beside its floor
        exact      bitwise equality of greedy text
        system     a system, by budget, prompt set and repeat
        batch      a system with many requests at a time
        part       paper mode without some of its parts, and fast mode without prefetch
        precision  both modes with spoilt plans
        work       one round of a system on its streams
        refused    a system that this machine's memory does not hold
        peer       what people have installed, or why it was not run

    Raises:
        UserError: no CUDA GPU, or none of the models is there.
    """
    need_gpu(context)
    work = [
        jobs.Job(
            f"{model}: {what}",
            function,
            {"model": model, "digest": routing.inputs_digest(model), "seed": context.seed, **more},
            cost,
            alone=True,
        )
        for model in _present(context)
        for what, function, more, cost in (
            ("same tokens", exact_rows, {}, 1.0),
            ("systems, high budget", system_rows, {"budget": "high"}, 5.0),
            ("systems, low budget", system_rows, {"budget": "low"}, 4.0),
            ("batches", batch_rows, {}, 3.0),
            ("peers", peer_rows, {}, 2.0),
        )
    ]
    return pd.DataFrame(jobs.run(context, work))


def _present(context: Context) -> list[str]:
    """The models, without untrained proxies; when all are untrained, what that means."""
    found, missing = [], None
    for model in context.models:
        try:
            resolve(model)
            found.append(model)
        except NotTrained as error:
            missing = error
    if not found:
        raise missing
    return found


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Speed-ups over cells of model, budget and prompt set; the rest over settings, all prompt sets together."""
    one_request = [
        *_speedups(rows),
        *_limits(rows),
        _compute_share(rows),
        *_passes(rows),
        _simulator(rows),
        *_exact(rows),
    ]
    return [*one_request, *engine_batch.claims(rows)]


def _speedups(rows: pd.DataFrame) -> list[Measured]:
    ms = medians(rows, "measured_ms_per_token").drop(index=ALL_SETS, level="prompt_set")
    ratio = (ms["specmoeoff"] / ms[ONLINE]).dropna()
    others = ", ".join(
        f"{title} {(ms['specmoeoff'] / ms[name]).mean():.2f}"
        for name, title in (("specter", "paper mode"), (SHARED, "CPU sharing"))
    )
    note = f"{len(ratio)} cells, smallest {ratio.min():.2f}; means for {others}"
    found = [_of_cells(f"over-specmoeoff@{name}", ratio, name, note) for name in ("mean", "max")]
    for system in ("lru", "lru-s"):
        ratio = (ms[system] / ms[ONLINE]).dropna()
        note = f"mean of {_range(ratio)}; with CPU sharing {(ms[system] / ms[SHARED]).mean():.2f}"
        found.append(_of_cells(f"over-demand-loading@{system}", ratio, "mean", note))
    fastest = fastest_systems(rows)
    best = pd.Series({cell: ms.at[cell, fastest[cell[:2]]] for cell in ms.index if cell[:2] in fastest})
    rounds = medians(rows, "n_rounds").xs(ALL_SETS, level="prompt_set")
    who = ", ".join(
        f"{model} {budget} {name} ({rounds.at[(model, budget), name]:.0f} rounds a repeat)"
        for (model, budget), name in fastest.items()
    )
    for claim, system in (("demand-loading", "lru"), ("paper-mode", "specter")):
        ratio = (ms[system] / best).dropna()
        found.append(_of_cells(f"best-over-{claim}", ratio, "mean", f"{_range(ratio)}; fastest: {who}"))
    found += _peers(rows)
    ratio = (ms[[ONLINE, "specter-fast"]].min(axis=1) / ms["specter"]).groupby(["model", "budget"]).mean().dropna()
    note = "fast mode over paper mode, worst of " + ", ".join(f"{m} {b} {v:.2f}" for (m, b), v in ratio.items())
    return [*found, _of_cells("not-slower-than-paper-mode", ratio, "max", note)]


def _of_cells(claim: str, ratio: pd.Series, how: str, note: str) -> Measured:
    """Mean or maximum over the cells that have both systems."""
    if ratio.empty:
        return Measured(f"specter-engine/{claim}", None, note="one of the two systems was refused")
    return Measured(f"specter-engine/{claim}", float(ratio.agg(how)), n=len(ratio), note=note)


def _range(ratio: pd.Series) -> str:
    return f"{len(ratio)} cells, {ratio.min():.2f} to {ratio.max():.2f}"


def _peers(rows: pd.DataFrame) -> list[Measured]:
    """Accelerate over fast mode, and llama.cpp over the best system of this engine that offloads."""
    ms = medians(rows, "measured_ms_per_token").xs((ALL_SETS, "high"), level=("prompt_set", "budget"))
    fastest = fastest_systems(rows).xs("high", level="budget")
    best = pd.Series({model: ms.at[model, name] for model, name in fastest.items()})
    found = []
    for claim, item, ours in (("over-accelerate", ACCELERATE, ms[ONLINE]), ("over-llama-cpp", LLAMA, best)):
        peers = rows[(rows["by"] == "peer") & (rows["item"] == item)]
        ran = peers[peers["measured_ms_per_token"].notna() & peers["model"].map(ours).notna()]
        if ran.empty:
            why = "; ".join(dict.fromkeys(peers["title"])) or "not run"
            found.append(Measured(f"specter-engine/{claim}", None, note=why))
            continue
        ratio = ran["measured_ms_per_token"].to_numpy() / ran["model"].map(ours).to_numpy()
        note = "; ".join(
            f"{r.model}, high budget: {r.measured_ms_per_token:.1f} ms per token; {r.title}" for r in ran.itertuples()
        )
        found.append(Measured(f"specter-engine/{claim}", float(ratio.min()), n=int(ran["n_tokens"].sum()), note=note))
    return found


def _limits(rows: pd.DataFrame) -> list[Measured]:
    table = limits(rows)
    ours = table[table["item"].isin([ONLINE, "specter-fast"])]
    bound = ours[ours["link_ms"] > ours["compute_ms"]]
    said = ", ".join(
        f"{r.model} {r.budget} {r.item}: {r.measured_ms:.1f} ms, link {r.link_ms:.1f}" for r in ours.itertuples()
    )
    busiest = float(bound["link_busy_share"].min()) if len(bound) else nan
    worst = ours["over_floor"].max()
    return [
        Measured("specter-engine/over-floor", None if np.isnan(worst) else float(worst), n=len(ours), note=said),
        Measured("specter-engine/link-busy", None if np.isnan(busiest) else busiest, n=len(bound),
                 note="the least busy setting of those that the link limits"),
    ]  # fmt: skip


def _compute_share(rows: pd.DataFrame) -> Measured:
    """As specter-latency-breakdown, measured: all time of plain decoding with demand loading that no copy was on its way."""
    demand = rows[(rows["item"] == "lru") & (rows["prompt_set"] == ALL_SETS)]
    share = (
        (1 - demand["copies_ms_per_token"] / demand["measured_ms_per_token"])
        .groupby([demand["model"], demand["budget"]])
        .median()
    )
    if share.empty:
        return Measured("specter-engine/compute-share", None, note="demand loading was refused")
    note = ", ".join(f"{model} {budget} {value:.1%}" for (model, budget), value in share.items())
    return Measured("specter-engine/compute-share", float(share.max()), n=len(share), note=note)


def _passes(rows: pd.DataFrame) -> list[Measured]:
    passes = rows[(rows["by"] == "pass") & rows["floor_ms"].notna()]
    passes = passes.drop_duplicates(["model", "item", "measured_ms"])  # measured once for both budgets, or for each
    passes["ratio"] = passes["measured_ms"] / passes["floor_ms"]
    found = []
    for claim, part in (("draft-step", passes["item"] == DRAFT_STEP), ("verify", passes["item"] == "verify 9")):
        chosen = passes[part]
        if chosen.empty:
            found.append(Measured(f"specter-engine/{claim}", None, note="no such pass was measured"))
            continue
        note = ", ".join(f"{r.model} {r.measured_ms:.2f} of {r.floor_ms:.2f} ms" for r in chosen.itertuples())
        found.append(Measured(f"specter-engine/{claim}", float(chosen["ratio"].max()), n=len(chosen), note=note))
    return found


def _simulator(rows: pd.DataFrame) -> Measured:
    table = limits(rows)
    error = table["simulator_error"].abs()
    note = f"median error {error.median():.1%}, largest {error.max():.1%}"
    return Measured("specter-engine/simulator", float((error <= CLOSE).mean()), n=len(error), note=note)


def _exact(rows: pd.DataFrame) -> list[Measured]:
    exact = rows[rows["by"] == "exact"]
    found = []
    for mode, part in exact.groupby("item"):
        equal, all_tokens = int(part["equal_tokens"].sum()), int(part["n_tokens"].sum())
        parted = int((part["equal_tokens"] < part["n_tokens"]).sum())
        found.append(
            Measured(
                f"specter-engine/exact@{mode}",
                equal / all_tokens,
                n=all_tokens,
                note=f"{parted} of {len(part)} texts part",
            )
        )
    return found
