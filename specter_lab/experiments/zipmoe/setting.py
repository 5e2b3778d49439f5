"""What the ZipMoE experiments share: wide models and their stores, prompts, popularity, and one run of one system.

Zoo models are a few megabytes; reading them takes no time. So they are widened first (the same function and routing), to
experts of the originals' order of size, with noise that keeps copies from being compressible (`models.widen.untiled`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from specter_lab import paths
from specter_lab.engine.store.layout import INDEX, Index, read_index
from specter_lab.engine.store.pack import DEFAULT_CODEC, pack
from specter_lab.engine.zipmoe.model import Generation, generate, open_store
from specter_lab.engine.zipmoe.settings import BASELINES, ZIPMOE, Settings
from specter_lab.errors import UserError
from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context
from specter_lab.experiments.specter.routing import inputs, model_digest
from specter_lab.experiments.zipmoe import sentences
from specter_lab.files import locked, whole_folder
from specter_lab.measure.decode import decode
from specter_lab.measure.prompts import select, tokenize
from specter_lab.measure.trace import Origin, Trace
from specter_lab.models.load import TRANSLATORS, load, read_config, resolve
from specter_lab.models.stacks import stacks_of
from specter_lab.models.widen import widen, widened_config
from specter_lab.plan.zipmoe.popularity import Popularity, observed

WIDE = {  # expert bytes in BF16: 4.7 MB (Qwen, DeepSeek, Switch), 9.4 MB (Phi); head width and routing stay
    "qwen-nano": dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=4, moe_intermediate_size=1536,
                      shared_expert_intermediate_size=256),
    "deepseek-nano": dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=4, moe_intermediate_size=1536,
                          kv_lora_rank=128),
    "phi-nano": dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=2, intermediate_size=3072),
    "switch-nano": dict(d_model=512, d_ff=2304),
}  # fmt: skip
DECODERS = ("qwen-nano", "deepseek-nano")  # of the paper's tables
WITH_TRANSLATOR = (*DECODERS, *TRANSLATORS)  # the paper's third model is an encoder-decoder
PROMPT_TOKENS, HISTORY_PER_SET, HISTORY_TOKENS = 32, 8, 128
BUDGET = 0.25  # of the experts' BF16 bytes, where nothing else is said
ZIP = replace(ZIPMOE, in_place=False, prefetch=2)
SYSTEMS = {s.name: s for s in (*BASELINES.values(), ZIP)}


@dataclass(frozen=True)
class Wide:
    """A widened model and its store."""

    name: str
    checkpoint: Path
    store: Path
    index: Index

    def budget_bytes(self, share: float) -> int:
        return int(share * self.index.total_bytes)


def served_models(context: Context, usual: Sequence[str] = DECODERS) -> list[str]:
    """The models of a run whose experts can be put on disk: `usual` where the user named none.

    Raises:
        UserError: there is none.
    """
    if context.folder_name == context.tier:
        return list(usual)
    known = [model for model in context.models if model in WIDE]
    if not known:
        raise UserError(
            f"this experiment runs zoo models that it widens: give MODELS='{' '.join(WIDE)}' or some of them"
        )
    return known


def inputs_of(context: Context, usual: Sequence[str] = DECODERS) -> dict[str, str]:
    """Every file that the models of a run read, name -> sha256."""
    return {name: digest for model in served_models(context, usual) for name, digest in _read_by(model).items()}


def _read_by(model: str) -> dict[str, str]:
    return {model: model_digest(model)} | sentences.files() if model in TRANSLATORS else inputs([model])


def timed_rows(context: Context, measure, usual: Sequence[str] = DECODERS) -> pd.DataFrame:
    """One job per served model, none beside another: `measure(model, digest, seed)`; models are put on disk side by side before."""
    models = served_models(context, usual)
    absent = [
        jobs.Job(f"{model}, on disk", put_on_disk, {"model": model}) for model in models if not _is_on_disk(model)
    ]
    jobs.run(replace(context, fresh=True, shared=None), absent)  # in processes of their own: what is shared may be one
    work = [
        jobs.Job(model, measure, {"model": model, "digest": _digest(model), "seed": context.seed}, alone=True)
        for model in models
    ]
    return pd.DataFrame(jobs.run(context, work))


def put_on_disk(model: str) -> jobs.Rows:
    """A job without rows: `wide` takes a minute."""
    wide(model)
    return []


def _digest(model: str) -> str:
    """Of everything that a job reads; it names the job's rows in the cache."""
    return hashlib.sha256(repr((_read_by(model), DEFAULT_CODEC)).encode()).hexdigest()


def scratch() -> Path:
    """The folder in the cache where wide models lie, and other files as large."""
    folder = paths.CACHE / "zipmoe"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _folder(model: str) -> Path:
    """Where a wide model lies, and its stores."""
    key = hashlib.sha256(json.dumps([model_digest(model), WIDE[model]]).encode()).hexdigest()[:12]
    return scratch() / f"{model}-{key}"


def _store(model: str) -> Path:
    return _folder(model) / f"store-{DEFAULT_CODEC}"


def _is_on_disk(model: str) -> bool:
    return (_store(model) / INDEX).exists()


@cache
def wide(model: str) -> Wide:
    """The widened model and its store with raw copies, made once and kept in the cache.

    Raises:
        UserError: a model that is not widened here, or the disk has no room for 3.7 times the experts.
    """
    config, folder = read_config(resolve(model)), _folder(model)
    folder.mkdir(exist_ok=True)
    checkpoint, store = folder / "checkpoint", _store(model)
    with locked(folder):
        if not checkpoint.exists():
            larger = type(config)(**{**config.to_dict(), **WIDE[model]})
            with whole_folder(checkpoint) as half:
                half.rmdir()
                widen(resolve(model), config, widened_config(config, larger), half, untile_seed=0)
        if not _is_on_disk(model):
            pack(str(checkpoint), store, raw=True)
            os.sync()  # what is dirty in the page cache cannot be dropped from it
    return Wide(model, checkpoint, store, read_index(store))


@cache
def prompts(model: str, count: int, seed: int) -> Tensor:
    """Token ids [count, length] of prompts, or of a translator's sentences, that are not in the history."""
    if model in TRANSLATORS:
        return sentences.sources(model, sentences.ASKED, count, seed)
    tokenizer = load(model).tokenizer
    per_set = -(-count // 5) + 4  # some are too short
    chosen = tokenize(select(per_set, seed=seed), tokenizer, PROMPT_TOKENS).at_least(PROMPT_TOKENS)
    if len(chosen.ids) < count:
        raise UserError(f"only {len(chosen.ids)} prompts of {PROMPT_TOKENS} tokens were found: ask for fewer")
    order = np.random.default_rng(seed).permutation(len(chosen.ids))[:count]
    return torch.stack([chosen.ids[i] for i in order])


@cache
def history(model: str, seed: int) -> Trace:
    """Routing of a decoder of the zoo while it continues earlier prompts: other ones than `prompts` gives."""
    source = load(model)
    tokens = tokenize(select(HISTORY_PER_SET, seed=seed + 10_000), source.tokenizer, PROMPT_TOKENS)
    return decode(source.model, tokens.at_least(PROMPT_TOKENS), Origin(model, source.digest, seed=seed),
                  prefix_tokens=PROMPT_TOKENS, new_tokens=HISTORY_TOKENS)  # fmt: skip


@cache
def popularity(model: str, seed: int) -> Popularity:
    """Of the experts, from earlier prompts or sentences."""
    experts = stacks_of(read_config(resolve(model))).num_experts
    if model in TRANSLATORS:
        return observed(sentences.routing(model, 5 * HISTORY_PER_SET, seed), experts)
    return observed(history(model, seed).indices.swapaxes(0, 1), experts)


@dataclass(frozen=True)
class Run:
    """One generation by one system, with its counters."""

    generation: Generation
    pools: str
    budget_bytes: int
    slab_bytes: int
    read_bytes: int
    read_s: float
    stall_s: float
    execute_s: float
    total_s: float
    hit_share: float  # of uses, in memory in any form

    @property
    def stall_share(self) -> float:
        return self.stall_s / self.total_s


def run_system(model: str, settings: Settings, ids: Tensor, new_tokens: int, *, share: float = BUDGET, seed: int = 0,
               warm_up: int = 4) -> Run:  # fmt: skip
    """Open the store under a budget, decode a few tokens of the prompts to fill the pools, then decode them for the record."""
    ready = wide(model)
    budget = ready.budget_bytes(share)
    with open_store(ready.store, budget, settings=settings, popularity=popularity(model, seed), batch=len(ids),
                    check=False) as served:  # fmt: skip
        runtime = served.runtime
        if warm_up:
            generate(served.model, ids, warm_up)
        runtime.reset()
        done = generate(served.model, ids, new_tokens)
        report, uses = runtime.report, runtime.report.hits_by_call
        hits, needed = np.sum(uses, axis=0)
        return Run(done, str(runtime.pools), budget, runtime.memory.num_bytes, runtime.reader.read_bytes,
                   runtime.reader.read_s, report.stall_s, report.execute_s, sum(done.step_s), float(hits / needed))  # fmt: skip


def row_of(model: str, system: str, run: Run, **what) -> dict:
    """One row of a timed run."""
    return {
        "model": model, "system": system, **what, "tokens": run.generation.tokens.numel(),
        "ttft_ms": round(1e3 * run.generation.ttft_s, 3), "tpot_ms": round(1e3 * run.generation.tpot_s, 3),
        "tokens_per_s": round(run.generation.tokens_per_s, 3), "total_s": round(run.total_s, 4),
        "read_mb": round(run.read_bytes / 1e6, 2), "stall_share": round(run.stall_share, 4),
        "hit_share": round(run.hit_share, 4), "pools": run.pools, "budget_mb": round(run.budget_bytes / 1e6, 1),
        "slab_mb": round(run.slab_bytes / 1e6, 1),
    }  # fmt: skip


def spread(values: pd.Series) -> tuple[float, float, float, int]:
    """Median, smallest and largest of repeated runs, and how many: what tables show."""
    return float(values.median()), float(values.min()), float(values.max()), len(values)


def paired_ratio(rows: pd.DataFrame, metric: str, above: str, below: str) -> tuple[float, float, float, int]:
    """Median, smallest and largest over repeats of one system's metric over another's, run next to each other."""
    table = rows.pivot_table(index=[c for c in ("model", "repeat", "batch", "budget_share", "new_tokens") if c in rows],
                             columns="system", values=metric)  # fmt: skip
    return spread((table[above] / table[below]).dropna())
