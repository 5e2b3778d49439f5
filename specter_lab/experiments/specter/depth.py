"""specter-depth: how many drafted tokens the target accepts, and how deep to speculate (Specter, section SIC).

Measured: real rounds of speculative decoding with the INT4 draft at nine depths K, greedy and sampled, on 25 prompts
(5 per set) x 3 repeats. A greedy run repeated on the same prompt is the same run, so a repeat is another draw of
prompts: 75 in all. Acceptance also by window position, prompt set, quantiser and prefix length.

Simulated: the time of every one of these rounds on the paper's GPU, with the bytes of the model that a zoo model stands
for, and from it K* = argmin TPOT under three definitions of TPOT (`plan.depth`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specter_lab.compress.quantizers import not_run_reason
from specter_lab.errors import UserError
from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import routing
from specter_lab.experiments.specter.depth_figure import (
    BEST,
    DEPTH,
    POSITION,
    PREFIX,
    QUANTIZER,
    REPEAT,
    SET,
    TPOT,
    chosen,
    plot,
)  # fmt: skip
from specter_lab.experiments.specter.setting import priced_as, slots_of
from specter_lab.measure import acceptance
from specter_lab.measure.acceptance import expected_accepted
from specter_lab.measure.bootstrap import Interval, ratio_interval
from specter_lab.measure.depths import greedy_rounds
from specter_lab.measure.prompts import PROMPT_SETS
from specter_lab.measure.sampling import GREEDY
from specter_lab.measure.speculate import Rounds, speculative_decode
from specter_lab.models.experts import with_experts
from specter_lab.paths import CACHE
from specter_lab.plan.depth import best_depth, round_costs, tpot_definitions
from specter_lab.plan.hardware import read_profile

__all__ = ["claims", "inputs", "plot", "run"]

PROMPTS_PER_SET, REPEATS = 5, 3  # five sets: 25 prompts, three times
POOL_PER_SET = 60  # requests from which those with a long enough prefix are taken
PREFIX_TOKENS = 16  # Specter: 16-token prompts
NEW_TOKENS = {GREEDY: 128, 0.7: 32, 1.0: 32}  # by temperature; Specter: greedy, 128
DEPTHS = (2, 4, 6, 8, 12, 16, 20, 24, 32)
DRAFT = "gptq-int4-batched"
QUANTIZERS = (DRAFT, "gguf-q4_k", "rtn-int8", "rtn-int4", "rtn-int3", "rtn-int2")
PREFIXES = (4, 8, 16, 32, 64, routing.MAX_TOKENS)  # tokens
SIDE_DEPTH, SIDE_TOKENS = 16, 32  # of the comparisons by quantiser and by prefix length, greedy


def inputs(context: Context) -> dict[str, str]:
    """Models and texts read, name -> sha256."""
    return routing.inputs(context.models)


def run(context: Context) -> pd.DataFrame:
    """Rows `by` depth, position, prompt set, repeat, quantiser and prefix length; simulated TPOT and best depth."""
    work = [
        *((measure_depths, f"T = {t}", {"temperature": t, "new_tokens": n}, n / 10) for t, n in NEW_TOKENS.items()),
        (measure_quantizers, "quantisers", {}, 8.0),
        (measure_prefixes, "prefix lengths", {}, 4.0),
    ]
    return pd.DataFrame(jobs.run(context, [
        jobs.Job(
            f"{model}, {name}", function,
            {"model": model, "digest": routing.inputs_digest(model), "seed": context.seed} | arguments, cost,
        )
        for model in context.models  # one after the other: a process keeps the model it has loaded, and its draft
        for function, name, arguments, cost in work
    ]))  # fmt: skip


def measure_depths(model: str, digest: str, seed: int, temperature: float, new_tokens: int) -> jobs.Rows:
    """All depths at one temperature. `digest` is here, and below, to name what is read in the cache key."""
    question = routing.ask(model, POOL_PER_SET, seed)
    prompts, sets = prompts_of(question, PREFIX_TOKENS)
    target, draft = question.source.model, draft_of(model, seed, DRAFT, CACHE)
    if temperature == GREEDY:
        rounds = greedy_rounds(target, draft, prompts, new_tokens=new_tokens, depths=DEPTHS)
    else:
        how = {"new_tokens": new_tokens, "temperature": temperature, "seed": seed}
        rounds = {k: speculative_decode(target, draft, prompts, depth=k, **how).rounds for k in DEPTHS}
    rows = [{"by": DEPTH, "item": depth} | _acceptance(found, seed) for depth, found in rounds.items()]
    rows += _positions(rounds[max(DEPTHS)], seed)
    side = rounds[SIDE_DEPTH]
    repeats = np.tile(np.arange(REPEATS).repeat(PROMPTS_PER_SET), len(PROMPT_SETS))  # [R]
    for by, label, names in ((SET, sets, PROMPT_SETS), (REPEAT, repeats, range(REPEATS))):
        for name in names:
            chosen = side.of(np.flatnonzero(label == name))
            rows.append({"by": by, "item": name} | _acceptance(chosen, seed))
    for budget, slots in slots_of(model, routing.family(model)).items() if temperature == GREEDY else ():
        rows += [
            {"budget": budget, "slots_per_layer": slots} | row for row in _tpot(model, rounds, slots, new_tokens, seed)
        ]
    return _named(model, question, rows, temperature=temperature, new_tokens=new_tokens, quantizer=DRAFT)


def measure_quantizers(model: str, digest: str, seed: int) -> jobs.Rows:
    """Greedy acceptance with every quantiser's experts in the draft; one that cannot run here has no row."""
    question = routing.ask(model, POOL_PER_SET, seed)
    prompts, _ = prompts_of(question, PREFIX_TOKENS)
    target, rows = question.source.model, []
    for name in QUANTIZERS:
        if not_run_reason(name, target.config.model_type):
            continue
        experts = routing.quantized(question, name, CACHE)
        draft = with_experts(target, experts.banks)
        rounds = speculative_decode(target, draft, prompts, new_tokens=SIDE_TOKENS, depth=SIDE_DEPTH).rounds
        found = {"quantizer": name, "bits_per_weight": round(experts.bits_per_weight, 3)} | _acceptance(rounds, seed)
        rows.append({"by": QUANTIZER, "item": name} | found)
    return _named(model, question, rows, temperature=GREEDY, new_tokens=SIDE_TOKENS)


def measure_prefixes(model: str, digest: str, seed: int) -> jobs.Rows:
    """Greedy acceptance after prefixes of different lengths of the same requests."""
    question = routing.ask(model, POOL_PER_SET, seed)
    prompts, _ = prompts_of(question, max(PREFIXES))
    target, draft, rows = question.source.model, draft_of(model, seed, DRAFT, CACHE), []
    for length in PREFIXES:
        decoded = speculative_decode(target, draft, prompts[:, :length], new_tokens=SIDE_TOKENS, depth=SIDE_DEPTH)
        rows.append({"by": PREFIX, "item": length} | _acceptance(decoded.rounds, seed))
    return _named(model, question, rows, temperature=GREEDY, new_tokens=SIDE_TOKENS, quantizer=DRAFT)


@lru_cache(maxsize=1)
def draft_of(model: str, seed: int, quantizer: str, cache_dir: Path) -> PreTrainedModel:
    """A model with quantised experts; the last one asked for is kept."""
    question = routing.ask(model, POOL_PER_SET, seed)
    return with_experts(question.source.model, routing.quantized(question, quantizer, cache_dir).banks)


def prompts_of(question: routing.Question, prefix_tokens: int) -> tuple[Tensor, np.ndarray]:
    """The prompts of all repeats, cut to the prefix, [R, P], and the set of each, [R].

    Raises:
        UserError: a prompt set has too few requests that long.
    """
    tokens = question.tokens.at_least(prefix_tokens)
    wanted, chosen, sets = PROMPTS_PER_SET * REPEATS, [], []
    for name in PROMPT_SETS:
        of_set = [
            ids[:prefix_tokens] for request, ids in zip(tokens.requests, tokens.ids) if request.prompt_set == name
        ]
        if len(of_set) < wanted:
            raise UserError(f"only {len(of_set)} of {POOL_PER_SET} prompts of '{name}' have {prefix_tokens} tokens for "
                            f"{question.source.name}, {wanted} are needed: take a larger pool")  # fmt: skip
        chosen += of_set[:wanted]
        sets += [name] * wanted
    return torch.stack(chosen), np.array(sets)


def _named(model: str, question: routing.Question, rows: jobs.Rows, **setting) -> jobs.Rows:
    """Rows with what they share."""
    common = {"model": question.source.name, "family": routing.family(model), **setting}
    return [{**common, **row, "item": str(row["item"])} for row in rows]


def _acceptance(rounds: Rounds, seed: int) -> dict:
    """Acceptance of one depth, and the experts its rounds need."""
    found = acceptance.measure(rounds, seed=seed)
    named = (rounds.needed & rounds.predicted).sum() / rounds.needed.sum()
    row = {"depth": rounds.depth, "n_requests": found.per_checked.n_requests, "n_rounds": found.n_rounds}
    for name in ("accepted_per_checked", "accepted_per_proposed", "tokens_per_round"):
        row |= _with_interval(name, getattr(found, name.removeprefix("accepted_")))
    return row | {
        "expected_tokens_per_round": round(1 + expected_accepted(float(found.per_checked.estimate), rounds.depth), 4),
        "distinct_experts": round(float(rounds.needed.sum(axis=2).mean()), 3),
        "predicted_share": round(float(named), 5),
    }


def _positions(rounds: Rounds, seed: int) -> jobs.Rows:
    found, rows = acceptance.by_position(rounds, seed=seed), []
    for i, n in enumerate(found.n_rounds):
        row = {"by": POSITION, "item": i + 1, "depth": rounds.depth, "n_rounds": int(n)}
        for name in ("per_checked", "per_proposed"):
            whole = getattr(found, name)
            at = Interval(whole.estimate[i], whole.low[i], whole.high[i], whole.n_requests, whole.confidence)
            row |= {"n_requests": at.n_requests} | _with_interval(f"accepted_{name}", at)
        rows.append(row)
    return rows


def _tpot(model: str, rounds: Mapping[int, Rounds], slots: float, new_tokens: int, seed: int) -> jobs.Rows:
    """Simulated TPOT of every depth under one budget, by definition, and the best depth of each definition."""
    priced, profile = priced_as(model), read_profile()
    tpot, rows = {}, []
    for depth, found in rounds.items():
        held = acceptance.residency(found, int(slots))
        round_ms = np.array([cost.total_ms for cost in round_costs(found, held, priced, profile, slots)])
        tpot[depth] = tpot_definitions(found, round_ms, new_tokens)
    for definition in ("paper", "steady", "decode"):
        by_depth = {depth: found[definition] for depth, found in tpot.items()}
        setting = {"definition": definition, "profile": profile.name, "priced_as": priced.name}
        for depth, found in by_depth.items():
            interval = ratio_interval(found.ms, found.tokens, seed=seed)
            row = {"by": TPOT, "item": depth, "depth": depth, "n_requests": interval.n_requests}
            rows.append(row | setting | _with_interval("simulated_tpot_ms", interval))
        best = best_depth(by_depth, seed=seed)
        row = {"by": BEST, "item": definition, "depth": best.depth, "n_requests": best.n_requests}
        rows.append(row | setting | {"depth_ci_low": best.low, "depth_ci_high": best.high})
    return rows


def _with_interval(name: str, interval: Interval) -> dict:
    """An estimate and its 95 % interval as columns."""
    ends = {"": interval.estimate, "_ci_low": interval.low, "_ci_high": interval.high}
    return {name + end: round(float(value), 5) for end, value in ends.items()}


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Greedy acceptance, mean over the models; best depth by the paper's TPOT at the high budget."""
    columns = [*_columns("accepted_per_checked"), *_columns("tokens_per_round")]
    means = chosen(rows, DEPTH).groupby("depth")[columns].mean()
    n = int(chosen(rows, DEPTH, depth=SIDE_DEPTH)["n_requests"].sum())
    checked = means.loc[SIDE_DEPTH, _columns("accepted_per_checked")].tolist()
    note = f"greedy, K = {SIDE_DEPTH}, mean of the models"
    sampled = chosen(rows, DEPTH, 1.0, depth=SIDE_DEPTH)["accepted_per_checked"]
    if len(sampled):  # greedy text of small models loops, and loops are easy to draft
        note += f"; sampled at T = 1, without loops, {sampled.min():.1%} to {sampled.max():.1%}"
    found = [Measured("specter-depth/acceptance", *checked, n=n, note=note)]
    unbounded = "specter-depth/expected-accepted-unbounded"
    if max(checked) < 1:
        ends = (expected_accepted(a, None) for a in checked)
        found.append(Measured(unbounded, *ends, n=n, note="no round of any depth measured here reaches it"))
    else:
        found.append(Measured(unbounded, None, note="acceptance, or its interval, reaches 1: the sum has no limit"))
    for depth in (8, 16, 32):
        accepted = means.loc[depth, _columns("tokens_per_round")] - 1
        note = "measured tokens per round without the target's own"
        found.append(Measured(f"specter-depth/expected-accepted@{depth}", *accepted, n=n, note=note))
    return found + [_best_depth(rows, family) for family in routing.FAMILIES.values()]


def _best_depth(rows: pd.DataFrame, family: str) -> Measured:
    claim = f"specter-depth/best-depth@{family}"
    best = chosen(rows, BEST, budget="high", item="paper", family=family)
    if best.empty:
        return Measured(claim, None, note=f"no {family} model was measured")
    row = best.iloc[0]  # one model per family answers the paper's claim: the first named
    ends = (float(row[name]) for name in _columns("depth"))
    note = f"{row['priced_as']} on {row['profile']}, the paper's TPOT formula"
    return Measured(claim, *ends, n=int(row["n_requests"]), simulated=True, note=note)


def _columns(name: str) -> list[str]:
    return [name, f"{name}_ci_low", f"{name}_ci_high"]
