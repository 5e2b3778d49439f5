"""Many requests at a time on the GPU of this machine: both clocks and throughput, by continuous batching (`engine.batch`)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import isnan, nan
from statistics import mean

import pandas as pd
import torch
from torch import Tensor

from specter_lab.engine.api import engine_for
from specter_lab.engine.decode import Meter
from specter_lab.engine.weights import Weights
from specter_lab.errors import UserError
from specter_lab.experiments import jobs
from specter_lab.experiments.context import Measured
from specter_lab.experiments.specter import routing
from specter_lab.experiments.specter.engine_machine import PROMPT_TOKENS
from specter_lab.experiments.specter.engine_runs import (
    NEW_TOKENS,
    SHARED,
    SYSTEMS,
    TEMPERATURE,
    USUAL_TOKENS,
    named,
    refused_row,
    wide_weights,
)
from specter_lab.experiments.specter.setting import BUDGETS, slots_of
from specter_lab.measure.prompts import PROMPT_SETS, select, tokenize
from specter_lab.plan.policy import Scene

BATCHES = (1, 4, 16, 32)
FEWEST_REQUESTS = 8
OURS = ("specter", SHARED, "specter-shared, residual transport")  # fast mode would read misses once for every 64 tokens
BATCHED = (*OURS, "specmoeoff", "lru-s")
BATCH = "batch"
REQUEST_CLOCK, BATCH_CLOCK, THROUGHPUT = "measured_request_tpot_ms", "measured_batch_tpot_ms", "measured_tokens_per_s"


def batch_rows(model: str, digest: str, seed: int) -> jobs.Rows:
    """Every system at every batch, at the high budget. `digest` names what is read in the cache key."""
    weights = wide_weights(model)
    slots = int(slots_of(model, routing.family(model))["high"])
    prompts = mixed_prompts(weights, max(BATCHES), seed)
    rows: jobs.Rows = []
    for name in BATCHED:
        try:
            rows += of_system(weights, model, name, slots, prompts, seed)
        except UserError as error:
            rows.append(refused_row(name, "high", error))
    return [named(model) | row for row in rows]


def mixed_prompts(weights: Weights, count: int, seed: int) -> list[Tensor]:
    """`count` different prompts of PROMPT_TOKENS, one of every set in turn."""
    tokens = tokenize(select(-(-2 * count // len(PROMPT_SETS)), seed=seed), weights.tokenizer, PROMPT_TOKENS)
    by_set: dict[str, list[Tensor]] = defaultdict(list)
    tokens = tokens.at_least(PROMPT_TOKENS)
    for request, ids in zip(tokens.requests, tokens.ids):
        by_set[request.prompt_set].append(ids)
    return [ids for turn in zip(*by_set.values()) for ids in turn][:count]


def of_system(
    weights: Weights, model: str, name: str, slots: int, prompts: Sequence[Tensor], seed: int
) -> Iterator[dict]:
    """One row per batch."""
    (mode, policy, transport), family = SYSTEMS[name], routing.family(model)
    engine = engine_for(weights, expert_budget=slots, in_slots=True, mode=mode, policy=policy, transport=transport)
    depth = engine.policy.depth_in(Scene(None, slots, BUDGETS[family].depth)) if engine.draft.banks else 0
    new_tokens = NEW_TOKENS.get(family, USUAL_TOKENS)
    for batch in BATCHES:
        requests = prompts[: max(batch, FEWEST_REQUESTS)]
        how = {"temperature": TEMPERATURE, "depth": depth, "seed": seed, "lanes": batch, "ignore_eos": True}
        engine.generate_batch(requests[:batch], 2, **how)  # passes are captured, slots filled
        engine.stats, came = Meter(), defaultdict(list)  # request -> when its pieces came, seconds
        began = time.perf_counter()
        for number, _ in engine.generate_batch(requests, new_tokens, stream=True, **how):
            came[number].append(time.perf_counter() - began)
        meter, tokens = engine.stats, len(requests) * new_tokens  # what the last rounds bring beyond is not counted
        moved = meter.h2d_bytes + meter.read_through_bytes
        yield {
            "by": BATCH, "item": name, "title": engine.policy.title, "mode": mode, "budget": "high", "batch": batch, "depth": depth,
            "n_requests": len(requests), "n_tokens": tokens, "n_rounds": meter.rounds,
            REQUEST_CLOCK: round(1e3 * mean((ends[-1] - ends[0]) / (new_tokens - 1) for ends in came.values()), 4),
            BATCH_CLOCK: round(1e3 * meter.seconds / tokens * batch, 4), THROUGHPUT: round(tokens / meter.seconds, 3),
            "measured_end_to_end_tokens_per_s": round(tokens / max(max(ends) for ends in came.values()), 3),
            "link_mb_per_token": round(moved / tokens / 1e6, 4), "hit_rate": round(meter.hits / meter.needed, 4),
            "distinct_per_pass": round(meter.needed / meter.rounds, 3), "acceptance": round(meter.acceptance, 4) if meter.drafted else None,
        }  # fmt: skip
    del engine
    torch.cuda.empty_cache()


def table(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """A column by model and system (rows) and batch (columns)."""
    chosen = rows[rows["by"] == BATCH].astype({"batch": int})
    return chosen.pivot_table(index=["model", "item"], columns="batch", values=column, sort=False)


def claims(rows: pd.DataFrame) -> list[Measured]:
    """What a batch costs a request, and what it brings over SpecMoEOff; the best of our systems each."""
    names = {"inflation": "batch-inflation", "throughput": "batch-over-specmoeoff"}
    if "batch" not in rows or rows.loc[rows["by"] == BATCH].empty:
        return [Measured(f"specter-engine/{name}", None, note="no batch was measured") for name in names.values()]
    clock, rate = table(rows, REQUEST_CLOCK), table(rows, THROUGHPUT)
    last, middle = max(rate.columns), sorted(rate.columns)[-2]
    at_middle, inflation = rate[middle].unstack("item"), (clock[last] / clock[min(clock.columns)]).unstack("item")
    ours = [name for name in OURS if name in at_middle]
    baseline = at_middle.get("specmoeoff", pd.Series(nan, at_middle.index))
    gains, inflation = at_middle[ours].div(baseline, axis=0), inflation[ours]
    requests = int(rows.loc[rows["by"] == BATCH, "n_requests"].max())
    found = (
        ("inflation", inflation.min(axis=1).max(), f"B = {last} over B = 1, a request's own clock: {_each(inflation)}"),
        ("throughput", gains.max(axis=1).min(), f"B = {middle}: {_each(gains)}"),
    )
    return [
        Measured(f"specter-engine/{names[name]}", float(value), n=requests, note=note) if not isnan(value)
        else Measured(f"specter-engine/{names[name]}", None, note="one of the two systems was refused")
        for name, value, note in found
    ]  # fmt: skip


def _each(values: pd.DataFrame) -> str:
    return ", ".join(f"{model} {name} {value:.2f}" for (model, name), value in values.stack().items())
