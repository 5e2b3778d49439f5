"""Answering one question: measure what is not known yet, judge the claims, write the result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import pandas as pd

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.experiments import results
from specter_lab.experiments.claims import Setting, claims_digest, judge_all
from specter_lab.experiments.context import Context, check_seed, need_gpu
from specter_lab.experiments.local_processes import SharedProcesses
from specter_lab.experiments.provenance import describe, gpu_name, question_digest
from specter_lab.experiments.registry import DEFAULT_MODELS, TIERS, check_tier, find
from specter_lab.experiments.results import Result
from specter_lab.models.load import shown_name


@dataclass(frozen=True)
class Measurement:
    """Rows of one question, not judged yet."""

    context: Context
    inputs: Mapping[str, str]  # what was read, name -> sha256
    rows: pd.DataFrame
    wall_s: float


def run(
    experiment: str,
    *,
    tier: str = "cpu",
    seed: int = 0,
    fresh: bool = False,
    models: Sequence[str] = (),
    runner: str = "local",
) -> Result:
    """The result of an experiment, measured now unless you already have it for the same inputs, seed and code.

    Args:
        experiment: id or alias.
        tier: "cpu", "gpu" or "paper".
        seed: of everything random.
        fresh: compute the rows again; quantised models are kept.
        models: zoo names, folders or hub ids to measure instead of the tier's own.
        runner: where rows are computed, "local" or "ray".

    Raises:
        UserError: unknown experiment, a tier it does not have or this machine cannot run, a model that cannot be loaded, a row that failed.
    """
    context = context_for(experiment, tier=tier, seed=seed, fresh=fresh, models=models, runner=runner)
    if tier == "gpu" and not models:  # before anything else that may be missing: without a GPU it would not help
        need_gpu(context)
    return answer(measure(context))


def measure(context: Context) -> Result | Measurement:
    """The rows of a question, or your result where you have one; may run beside others, in any thread.

    Raises:
        UserError: as `run`.
    """
    inputs = module_of(context.experiment).inputs(context) | {"claims": claims_digest(context.experiment)}
    mine = results.read(context.experiment, context.folder_name, paths.RESULTS)
    if mine and not context.fresh and mine.provenance.get("question") == question_digest(context, inputs):
        return mine
    start = time.monotonic()
    rows = module_of(context.experiment).run(context)
    return Measurement(context, inputs, rows, time.monotonic() - start)


def answer(found: Result | Measurement) -> Result:
    """The written result of what was measured: judged and drawn here, in the main thread, as figures have to be."""
    if isinstance(found, Result):
        return found
    context, rows, module = found.context, found.rows, module_of(found.context.experiment)
    setting = Setting(context.tier, own_models=context.folder_name != context.tier, gpu=gpu_name())
    verdicts = judge_all(context.experiment, module.claims(rows), setting)
    provenance = describe(context, found.inputs, wall_s=found.wall_s)
    extra = module.files(rows) if hasattr(module, "files") else {}
    return results.write(context.experiment, context.folder_name, rows, verdicts, module.plot(rows), provenance, extra)


def module_of(experiment: str) -> ModuleType:
    """What defines an experiment; see `experiments.context`."""
    return import_module(find(experiment).module)


def load_or_run(
    experiment: str, *, tier: str = "cpu", seed: int = 0, models: Sequence[str] = (), recompute: bool = False
) -> Result:
    """What a notebook shows: your result for this tier, seed and models, else the recorded one, else a run of minutes.

    `result.origin` says which it is. Code and inputs may have moved on since; `run` is the one that checks them, and what
    `recompute` asks for: what you have measured of the same question is kept, the recorded result is not looked at.

    Raises:
        UserError: as `run`.
    """
    context = context_for(experiment, tier=tier, seed=seed, models=models)
    shown = [shown_name(model) for model in context.models]
    for root in () if recompute else (paths.RESULTS, paths.RECORDED):
        result = results.read(context.experiment, context.folder_name, root)
        if result and (result.provenance.get("seed"), result.provenance.get("models")) == (seed, shown):
            return result
    return run(experiment, tier=tier, seed=seed, models=models)


def context_for(
    experiment: str,
    *,
    tier: str,
    seed: int,
    fresh: bool = False,
    models: Sequence[str] = (),
    runner: str = "local",
    shared: SharedProcesses | None = None,
) -> Context:
    """The context of a run. Raises UserError for an unknown experiment or tier, or a seed that is none."""
    row = find(experiment)
    if tier not in TIERS:
        raise UserError(f"no tier '{tier}': give one of {', '.join(TIERS)}")
    check_tier(row, tier)
    check_seed(seed)
    names = [shown_name(model) for model in models]
    if len(set(names)) < len(names):
        raise UserError(f"two of the models are called '{max(names, key=names.count)}': rename one of the folders")
    return Context(row.id, tier, seed, tuple(models) or DEFAULT_MODELS[tier], fresh, runner, shared)
