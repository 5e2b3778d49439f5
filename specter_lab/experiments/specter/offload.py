"""What the offloading experiments share: recorded windows of every model, and scenes to put policies into.

Windows are recorded on zoo models with real INT4 drafts; a scene prices them as the original that a zoo model stands for
(`setting.priced_as`), on a named machine, at the paper's slots. Requests are split: the first HISTORY_PER_SET of every
prompt set are what policies may learn from, the others are simulated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from specter_lab.errors import UserError
from specter_lab.experiments.provenance import recording_digest
from specter_lab.experiments.specter import routing
from specter_lab.experiments.specter.setting import BUDGETS, priced_as, slots_of
from specter_lab.measure.windows import Windows, read_windows, record_windows, write_windows
from specter_lab.models.experts import with_experts, with_top_k
from specter_lab.models.load import shown_name
from specter_lab.paths import CACHE
from specter_lab.plan.hardware import PAPERS_GPU, read_profile
from specter_lab.plan.policy import Policy, Scene
from specter_lab.plan.step_costs import StepCosts
from specter_lab.plan.workload import Workload, workload_for

PROMPT_TOKENS, NEW_TOKENS = 16, 128  # Specter, artifact
MAX_DEPTH = 16
SAMPLED = 1.0  # temperature of the text: small models repeat themselves greedily, which flatters a cache
HISTORY_PER_SET, REQUESTS_PER_SET = 2, 7
POOL_PER_SET = 40  # prompts asked for, so that enough are long enough
DRAFT = "gptq-int4-batched"


@dataclass(frozen=True)
class Traffic:
    """One model's recorded windows, priced as its original: what was learned from, and what is simulated."""

    model: str
    history: Workload
    requests: Workload


def traffic(model: str, seed: int, draft: str = "int4") -> Traffic:
    """Windows of `model` with a draft of that kind ("int4" or "fewer", see `plan.policy`); recorded once, then kept.

    Raises:
        UserError: too few long prompts, or an architecture that cannot draft with fewer experts.
    """
    windows, priced = _windows(model, seed, draft), priced_as(model)
    first = first_of_each(windows.prompt_set, HISTORY_PER_SET)
    others = np.setdiff1d(np.arange(windows.requests), first)
    return Traffic(model, workload_for(windows.of(first), priced), workload_for(windows.of(others), priced))


def first_of_each(sets: Sequence[str], count: int) -> np.ndarray:
    """The first `count` requests of every prompt set, by row: those that policies may learn from."""
    return np.concatenate([np.flatnonzero(np.array(sets) == name)[:count] for name in dict.fromkeys(sets)])


def scene(
    traffic: Traffic, *, budget: str = "high", slots: int | None = None, profile: str = PAPERS_GPU, fused: bool = True
) -> Scene:
    """The paper's setting for one model: its slots per layer at the "high" or "low" budget (or `slots`), its K*."""
    known = {"history": traffic.history, "future": traffic.requests}
    return replace(empty_scene(traffic.model, budget, slots, profile, fused), **known)


def empty_scene(
    model: str, budget: str = "high", slots: int | None = None, profile: str = PAPERS_GPU, fused: bool = True
) -> Scene:
    """The same setting without requests: for policies that learn from none."""
    priced, family = priced_as(model), routing.family(model)
    return Scene(
        costs=StepCosts(priced, read_profile(profile), fused, context_tokens=PROMPT_TOKENS + NEW_TOKENS // 2),
        slots_per_layer=int(slots_of(model, family)[budget]) if slots is None else slots,
        depth=BUDGETS[family].depth if family in BUDGETS else MAX_DEPTH,
    )


def traffic_for(policy: Policy, model: str, seed: int) -> Traffic:
    """The windows that fit a policy's draft; plain decoding reads them as well."""
    return traffic(model, seed, policy.draft or "int4")


def _windows(model: str, seed: int, draft: str) -> Windows:
    path, digest = _windows_file(model, seed, draft), routing.model_digest(model)
    try:
        return read_windows(path, model_digest=digest)
    except UserError:  # not there yet, or damaged: recorded anew
        write_windows(_record(routing.ask(model, POOL_PER_SET, seed), seed, draft), path, model_digest=digest)
        return read_windows(path, model_digest=digest)


def _windows_file(model: str, seed: int, draft: str) -> Path:
    asked = [routing.model_digest(model), draft, seed, PROMPT_TOKENS, NEW_TOKENS, MAX_DEPTH, SAMPLED,
             HISTORY_PER_SET + REQUESTS_PER_SET, recording_digest()]  # fmt: skip
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    return CACHE / "windows" / f"{shown_name(model)}-{draft}-{key}.safetensors"


def _record(question: routing.Question, seed: int, draft: str) -> Windows:
    prompts, sets = long_prompts(question)
    return record_windows(
        question.source.model, drafter(question, draft), prompts, sets, new_tokens=NEW_TOKENS, max_depth=MAX_DEPTH,
        temperature=SAMPLED, seed=seed,
    )  # fmt: skip


def drafter(question: routing.Question, draft: str = "int4") -> PreTrainedModel:
    """The model's own draft of that kind."""
    target = question.source.model
    if draft == "int4":
        return with_experts(target, routing.quantized(question, DRAFT, CACHE).banks)
    return with_top_k(target, max(1, target.config.num_experts_per_tok // 2))


def long_prompts(question: routing.Question) -> tuple[torch.Tensor, list[str]]:
    """The first prompts of every set that are long enough, cut to PROMPT_TOKENS: ids [R, P], and their sets."""
    long_enough = question.tokens.at_least(PROMPT_TOKENS)
    wanted, chosen, sets = HISTORY_PER_SET + REQUESTS_PER_SET, [], []
    for name in dict.fromkeys(request.prompt_set for request in long_enough.requests):
        of_set = [ids for request, ids in zip(long_enough.requests, long_enough.ids) if request.prompt_set == name]
        if len(of_set) < wanted:
            raise UserError(f"only {len(of_set)} prompts of '{name}' have {PROMPT_TOKENS} tokens for "
                            f"{question.source.name}, {wanted} are needed: give longer prompts")  # fmt: skip
        chosen += of_set[:wanted]
        sets += [name] * wanted
    return torch.stack([ids[:PROMPT_TOKENS] for ids in chosen]), sets
