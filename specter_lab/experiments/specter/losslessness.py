"""specter-losslessness: speculative decoding writes what the target alone would write (Specter, losslessness).

Greedy: the texts of speculative decoding against those of plain decoding, in two precisions, with the first divergence
and how close the two best tokens were there; and beside it what causes divergences, the rounding of a pass of K+1
tokens against passes of one, on given text (PAPERS.md section 1, trap 9).

Sampled: counts of sampled continuations against their exact law, on the models with a vocabulary cut to eight tokens.
Two accept rules that are wrong on purpose must fail the same test, else it shows nothing.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from random import Random

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import routing
from specter_lab.experiments.specter.losslessness_figure import PARITY, RULE, WIDTH, plot
from specter_lab.measure.bootstrap import ratio_interval
from specter_lab.measure.distribution import (
    RULES,
    STANDARD,
    continuation_index,
    continuation_law,
    goodness_of_fit,
    with_vocabulary,
)  # fmt: skip
from specter_lab.measure.parity import WidthEffect, greedy_parity, width_effect
from specter_lab.measure.speculate import speculative_decode
from specter_lab.models.experts import with_experts
from specter_lab.models.load import load
from specter_lab.paths import CACHE

__all__ = ["claims", "inputs", "plot", "run"]

DRAFT, COARSE_DRAFT = "gptq-int4-batched", "rtn-int2"  # the coarse one is wrong often enough for wrong rules to show
PRECISIONS = ("float32", "bfloat16")
PREFIX_TOKENS, NEW_TOKENS, DEPTH = 16, 512, 8  # of the greedy comparison, one prompt per set
QUANTILES = np.linspace(0, 1, 21)  # of the logit differences and margins that rows keep

VOCABULARY, CONTINUATION, WINDOW, PROMPT = 8, 3, 2, 16  # tokens: V, length of a continuation, K, length of its prompt
SAMPLES, GPU_SAMPLES, BATCH = 4000, 40_000, 2000  # continuations: of a test on a CPU, on a GPU, drawn together
TESTS = (
    (STANDARD, DRAFT, 0.7), (STANDARD, DRAFT, 1.0), (STANDARD, COARSE_DRAFT, 1.0),
    ("always accept", COARSE_DRAFT, 1.0), ("no residual", COARSE_DRAFT, 1.0),
)  # rule, draft, temperature  # fmt: skip
CERTAIN = 1e-6  # p-value that a wrong rule must stay below
inputs = routing.inputs_of


def run(context: Context) -> pd.DataFrame:
    """Rows `by` parity (one per prompt), width (quantiles of the rounding) and rule (one per test)."""
    samples = SAMPLES if context.tier == "cpu" else GPU_SAMPLES
    work = [
        *((function, {"precision": p}, 4.0) for p in PRECISIONS for function in (measure_parity, measure_rounding)),
        *(
            (measure_sampled, {"rule": rule, "quantizer": draft, "temperature": t, "samples": samples}, 4.0)
            for rule, draft, t in TESTS
        ),
    ]
    return pd.DataFrame(jobs.run(context, [
        jobs.Job(
            f"{model}, {', '.join(map(str, arguments.values()))}", function,
            {"model": model, "digest": routing.inputs_digest(model), "seed": context.seed} | arguments, cost,
        )
        for function, arguments, cost in work
        for model in context.models
    ]))  # fmt: skip


def measure_parity(model: str, digest: str, seed: int, precision: str) -> jobs.Rows:
    """Parity of one prompt per set. `digest` is here, and below, to name what is read in the cache key."""
    question, target = _read(model, seed, precision)
    draft = with_experts(target, routing.quantized(question, DRAFT, CACHE).banks)
    length = min(PREFIX_TOKENS, *map(len, question.tokens.ids))
    prompts = torch.stack([ids[:length] for ids in question.tokens.ids])  # [B, P]
    found = greedy_parity(target, draft, prompts, new_tokens=NEW_TOKENS, depth=DEPTH)
    return [{
        "model": question.source.name, "precision": precision, "depth": DEPTH, "by": PARITY, "item": request.prompt_set,
        "new_tokens": parity.new_tokens, "equal_tokens": parity.equal_tokens, "margin": parity.margin,
        "tokens_per_round": round(parity.tokens_per_round, 3), "repeated_share": round(parity.repeated, 3),
    } for request, parity in zip(question.tokens.requests, found)]  # fmt: skip


def measure_rounding(model: str, digest: str, seed: int, precision: str) -> jobs.Rows:
    """What the width of a pass does to the logits of given text."""
    question, target = _read(model, seed, precision)
    base = {"model": question.source.name, "precision": precision, "depth": DEPTH}
    return [base | row for row in _rounding([width_effect(target, ids, DEPTH + 1) for ids in question.tokens.ids])]


@lru_cache(maxsize=2)
def _read(model: str, seed: int, precision: str) -> tuple[routing.Question, PreTrainedModel]:
    """One request per set, and the model in that precision."""
    question = routing.ask(model, 1, seed)
    return question, load(model, dtype=getattr(torch, precision), device=question.source.model.device).model


def _rounding(effects: list[WidthEffect]) -> jobs.Rows:
    """Quantiles of the logit differences and of the margins, over all texts."""
    difference, margin, flipped = (
        np.concatenate([getattr(e, name) for e in effects]) for name in ("difference", "margin", "flipped")
    )
    return [
        {"by": WIDTH, "item": f"{q:.2f}", "n_tokens": len(margin), "flipped_tokens": int(flipped.sum()),
         "difference": float(f"{np.quantile(difference, q):.4g}"), "margin": float(f"{np.quantile(margin, q):.4g}")}
        for q in QUANTILES
    ]  # fmt: skip


def measure_sampled(
    model: str, digest: str, seed: int, rule: str, quantizer: str, temperature: float, samples: int
) -> jobs.Rows:
    """One test of sampled continuations against their law, in float32: in fewer bits the law depends on how it is read.

    Every test draws from a stream of its own, for tests that share random numbers err together.
    """
    question = routing.ask(model, 5, seed)
    whole = load(model, dtype=torch.float32, device=question.source.model.device).model
    vocabulary = _frequent_tokens(question.tokens.ids)
    target = with_vocabulary(whole, vocabulary)
    draft = with_vocabulary(with_experts(whole, routing.quantized(question, quantizer, CACHE).banks), vocabulary)
    prompt = torch.randint(VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(seed))
    laws = [continuation_law(m, prompt, CONTINUATION, temperature) for m in (target, draft)]
    counts = np.zeros(VOCABULARY**CONTINUATION, dtype=int)
    seeds = Random(repr((question.source.name, seed, rule, quantizer, temperature)))
    for start in range(0, samples, BATCH):
        decoded = speculative_decode(
            target, draft, prompt.expand(min(BATCH, samples - start), -1), new_tokens=CONTINUATION, depth=WINDOW,
            temperature=temperature, seed=seeds.getrandbits(63), rule=RULES[rule],
        )  # fmt: skip
        counts += np.bincount(continuation_index(decoded.tokens, VOCABULARY), minlength=len(counts))
    fit = goodness_of_fit(counts, laws[0])
    return [{
        "by": RULE, "item": rule, "model": question.source.name, "quantizer": quantizer, "temperature": temperature,
        "depth": WINDOW, "n_samples": fit.n, "cells": fit.cells, "chi_square": round(fit.chi_square, 3),
        "p_value": float(f"{fit.p_value:.4g}"), "total_variation": round(fit.total_variation, 5),
        "total_variation_at_most": round(fit.total_variation_at_most, 5),
        "draft_total_variation": round(float(np.abs(laws[1] - laws[0]).sum() / 2), 5),
    }]  # fmt: skip


def _frequent_tokens(ids: tuple[Tensor, ...]) -> Tensor:
    """The VOCABULARY most frequent tokens of some texts."""
    return torch.tensor([token for token, _ in Counter(torch.cat(ids).tolist()).most_common(VOCABULARY)])


def none_of(count: int, confidence: float = 0.95) -> float:
    """Upper bound on a share of which none was seen in `count` draws (Clopper and Pearson, one-sided)."""
    return 1 - (1 - confidence) ** (1 / count)


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Share of tokens before the first divergence in each precision; the corrected p-value of the standard rule.

    Where no text parts there is nothing to resample; the exact bound on the share of texts that would part stands instead.
    """
    found = []
    parity = rows[rows["by"] == PARITY]
    for precision, part in parity.groupby("precision", sort=False):
        share = ratio_interval(part["equal_tokens"].to_numpy(), part["new_tokens"].to_numpy())
        parted = part[part["equal_tokens"] < part["new_tokens"]]
        note = aside = f"{len(parted)} of {len(part)} texts part"
        interval = (float(share.low), float(share.high)) if len(parted) else (None, None)
        if len(parted):
            note += f", at margins up to {parted['margin'].max():.3g}"
        else:
            note = aside = f"{aside}: at most {none_of(len(part)):.0%} of all texts would (95 %, one-sided, exact)"
        name = f"specter-losslessness/greedy-parity@{precision}"
        found.append(Measured(name, float(share.estimate), *interval, n=len(part), note=note, aside=aside))
    tests = rows[rows["by"] == RULE]
    standard, wrong = tests[tests["item"] == STANDARD], tests[tests["item"] != STANDARD]
    claim = "specter-losslessness/sampling"
    if wrong["p_value"].max() > CERTAIN:
        blind = wrong.loc[wrong["p_value"].idxmax()]
        note = f"the test does not see that '{blind['item']}' is wrong on {blind['model']} (p = {blind['p_value']:.2g})"
        return [*found, Measured(claim, None, note=note)]
    corrected = min(1.0, float(standard["p_value"].min()) * len(standard))
    note = f"smallest of {len(standard)} p-values times {len(standard)}; wrong rules: p < {CERTAIN:g}"
    return [*found, Measured(claim, corrected, n=int(standard["n_samples"].sum()), note=note)]
