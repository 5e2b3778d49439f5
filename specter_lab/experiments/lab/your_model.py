"""lab-your-model: what Specter would make of a model of your own, measured by the papers' definitions.

    specter-lab measure path/to/checkpoint --quantizer gptq-int4 --prompts mine.txt

The draft is the model with its routed experts quantised. `measure_model` does everything; the notebook takes the same
steps one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specter_lab import paths
from specter_lab.compress.checkpoint import QuantizedExperts, load_quantized
from specter_lab.compress.quantizers import QUANTIZERS
from specter_lab.experiments.lab.asked import (
    DEPTHS,
    NEW_TOKENS,
    PREFIX_TOKENS,
    Asked,
    ask,
    check_depth,
    check_quantizer,
)  # fmt: skip
from specter_lab.experiments.lab.prediction import predict, slots_that_fit
from specter_lab.experiments.lab.report import Estimate, ExplosionRow, Report, Subject
from specter_lab.experiments.specter.routing import Question, quantized
from specter_lab.experiments.specter.setting import priced_as
from specter_lab.measure import fidelity
from specter_lab.measure.capture import capture
from specter_lab.measure.decode import decode
from specter_lab.measure.draft import free_running_draft
from specter_lab.measure.explosion import distinct_experts, uniform_routing
from specter_lab.measure.prompts import PROMPT_SETS
from specter_lab.measure.speculate import Rounds, speculative_decode
from specter_lab.measure.trace import Trace
from specter_lab.models.experts import with_experts
from specter_lab.models.load import check_device, shown_name
from specter_lab.plan.hardware import PAPERS_GPU, read_profile

WINDOWS = (1, 2, 4, 8, 16, 32)
REQUESTS = 20  # of every source of prompts


def measure_model(
    model: str,
    *,
    quantizer: str = "gptq-int4",
    prompts: Sequence[str] = PROMPT_SETS,
    requests: int = REQUESTS,
    max_tokens: int | None = None,
    depth: int = 16,
    profile: str = PAPERS_GPU,
    memory_gb: float | None = None,
    seed: int = 0,
    device: str | None = None,
    on_step: Callable[[str], None] = lambda text: None,
) -> Report:
    """Routing fidelity, expert explosion, acceptance and the predicted depth K* of one model.

    Args:
        model: zoo name, folder or hub id, of an architecture that has an adapter.
        quantizer: of the draft's routed experts, by name (`compress.quantizers`); or the path or hub id of a quantised
            checkpoint of the same model.
        prompts: .txt or .jsonl files, or prompt sets by name.
        requests: how many prompts of each.
        max_tokens: of each prompt; None: all.
        depth: the largest K, up to 32.
        profile: machine of the prediction, by name (`plan.hardware`).
        memory_gb: its GPU memory in 10^9 bytes; None: all it has.
        seed: of everything drawn.
        device: torch device, on others than the CPU the weights are BF16; None: `models.load.placement` decides.
        on_step: called with a few words when a step begins.

    Raises:
        UserError: whatever is wrong with model, quantiser, prompts, depth or profile.
    """
    if device is not None:
        check_device(device)
    check_depth(depth)
    check_quantizer(quantizer)
    machine, priced = read_profile(profile), priced_as(model)
    memory_gb = machine.memory_gb if memory_gb is None else memory_gb
    slots_that_fit(priced, memory_gb, context_tokens=PREFIX_TOKENS + NEW_TOKENS)  # or minutes of measuring are lost
    on_step(f"loading {shown_name(model)}")
    asked = ask(model, prompts, requests=requests, max_tokens=max_tokens, depth=depth, seed=seed, device=device)
    question, prefix_tokens = asked.question, asked.prefix_tokens
    on_step(f"quantising: {quantizer}")
    experts = quantised_experts(question, quantizer)
    draft = with_experts(question.source.model, experts.banks)
    on_step("routing")
    traces = routing(question, draft, prefix_tokens, depth)
    on_step("continuations")
    plain = continuations(question, prefix_tokens)
    on_step(f"speculative rounds up to K = {depth}")
    rounds = speculative_rounds(question, draft, prefix_tokens, depth)
    depths, prediction = predict(rounds, plain, priced, machine, memory_gb=memory_gb, new_tokens=NEW_TOKENS, seed=seed)
    return Report(
        subject=describe(asked, experts, prompts),
        fidelity_teacher_forced=by_definition(fidelity.compare(traces.model, traces.draft), seed),
        fidelity_free_running=by_definition(fidelity.compare(traces.verified, traces.drafted), seed),
        explosion=explosion_rows(traces.model, plain, seed),
        depths=depths,
        simulated=prediction,
    )


@dataclass(frozen=True)
class Traces:
    """Routing of model and draft, over the same tokens two by two."""

    model: Trace  # the prompts
    draft: Trace
    verified: Trace  # windows that the draft wrote, by the model
    drafted: Trace  # the same, by the draft


def quantised_experts(question: Question, quantizer: str) -> QuantizedExperts:
    """The draft's experts: made by a quantiser (from the cache, if it has them) or read from a checkpoint."""
    if quantizer in QUANTIZERS:
        return quantized(question, quantizer, paths.CACHE)
    return load_quantized(quantizer, question.source)


def routing(question: Question, draft: PreTrainedModel, prefix_tokens: int, depth: int) -> Traces:
    """Teacher-forced over the prompts, and free-running in one window of `depth` tokens after each prefix."""
    model, tokens, ours, theirs = question.source.model, question.tokens, question.origin(), question.origin("draft")
    windows = free_running_draft(model, draft, tokens, ours, theirs, prefix_tokens=prefix_tokens, depth=depth)
    return Traces(capture(model, tokens, ours), capture(draft, tokens, theirs), windows.target, windows.draft)


def continuations(question: Question, prefix_tokens: int) -> Trace:
    """Routing of the model while it continues every prefix greedily."""
    return decode(
        question.source.model, question.tokens, question.origin(), prefix_tokens=prefix_tokens, new_tokens=NEW_TOKENS
    )


def speculative_rounds(
    question: Question, draft: PreTrainedModel, prefix_tokens: int, depth: int
) -> Mapping[int, Rounds]:
    """Greedy rounds of every depth up to `depth`, after the same prefixes."""
    model, start = question.source.model, prefixes(question, prefix_tokens)
    return {
        k: speculative_decode(model, draft, start, new_tokens=NEW_TOKENS, depth=k, seed=question.seed).rounds
        for k in sorted({k for k in DEPTHS if k <= depth} | {depth})
    }


def prefixes(question: Question, prefix_tokens: int) -> Tensor:
    """The beginning of every prompt: [R, P]."""
    return torch.stack([ids[:prefix_tokens] for ids in question.tokens.ids])


def by_definition(match: fidelity.Fidelity, seed: int) -> dict[str, Estimate]:
    """Mean match by every definition, with its interval."""
    return {
        name: Estimate.of(fidelity.mean_interval(getattr(match, name), match.request_index, seed=seed))
        for name in fidelity.DEFINITIONS
    }


def explosion_rows(prefill: Trace, plain: Trace, seed: int) -> tuple[ExplosionRow, ...]:
    """Distinct experts in windows of the prompts and of their continuations, beside uniform routing."""
    columns = [_explosion(trace, seed) for trace in (prefill, plain)]
    return tuple(
        ExplosionRow(k, *(column.get(k) for column in columns), uniform_routing(prefill.num_experts, prefill.top_k, k))
        for k in WINDOWS
        if any(k in column for column in columns)
    )


def _explosion(trace: Trace, seed: int) -> dict[int, Estimate]:
    longest = int(np.bincount(trace.request_index).max())
    counted = distinct_experts(trace, min(max(WINDOWS), longest))
    enough = [k for k in WINDOWS if k <= longest and (counted.windows[k - 1] > 0).sum() >= 2]
    return {k: Estimate.of(counted.interval(k, seed=seed)) for k in enough}


def describe(asked: Asked, experts: QuantizedExperts, prompts: Sequence[str]) -> Subject:
    """What was measured, on what; files by name, without this machine's paths."""
    question, source = asked.question, asked.question.source
    return Subject(
        model=source.name,
        model_digest=source.digest,
        architecture=source.adapter.model_type,
        moe_layers=len(source.adapter.moe_layers(source.model)),
        num_experts=source.num_experts,
        top_k=source.top_k,
        quantizer=experts.quantizer,
        bits_per_weight=experts.bits_per_weight,
        starved_experts=None if experts.coverage is None else len(experts.coverage.starved),
        notes=experts.notes,
        prompts=tuple(Path(name).name for name in prompts),
        n_prompts=len(question.tokens.requests),
        n_tokens=question.tokens.num_tokens,
        left_out=asked.left_out,
        prefix_tokens=asked.prefix_tokens,
        seed=question.seed,
    )
