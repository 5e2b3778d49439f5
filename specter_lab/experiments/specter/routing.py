"""What the routing experiments share: the same requests, the same draft, and a reference trace that is captured once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path

import pandas as pd
from transformers import PreTrainedModel

from specter_lab import paths
from specter_lab.compress.calibration import CALIBRATION, calibration_ids
from specter_lab.compress.checkpoint import QuantizedExperts, load_quantized
from specter_lab.compress.quantizers import quantize
from specter_lab.errors import UserError
from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context
from specter_lab.experiments.provenance import code_digest
from specter_lab.experiments.specter.setting import priced_as
from specter_lab.files import sha256_of
from specter_lab.measure.capture import capture
from specter_lab.measure.decode import decode
from specter_lab.measure.prompts import PROMPT_SETS, TokenizedRequests, select, tokenize
from specter_lab.measure.trace import Origin, Trace, read_trace, write_trace
from specter_lab.models.load import LoadedModel, checkpoint_digest, load, placement, read_config, resolve, shown_name

MAX_TOKENS = 96  # of each request, teacher-forced
PREFIX_TOKENS = 32  # read by the target before a free-running window or a continuation
NEW_TOKENS = 128  # of a continuation
DEPTH = 16  # tokens of a free-running window
DRAFT_BUDGET = 8192  # prefix tokens per batch of free-running windows: a draft step is one token per request
FAMILIES = {"qwen2_moe": "qwen", "phimoe": "phi", "deepseek_v2": "deepseek"}  # as claims.toml names them


@dataclass(frozen=True)
class Question:
    """One model read over one selection of requests."""

    source: LoadedModel
    tokens: TokenizedRequests
    seed: int

    def origin(self, quantizer: str = "none") -> Origin:
        return Origin(self.source.name, self.source.digest, quantizer, self.seed)


@cache
def model_digest(model: str) -> str:
    """sha256 over the checkpoint of a model by zoo name, folder or hub id."""
    return checkpoint_digest(resolve(model))


def inputs(models: Sequence[str]) -> dict[str, str]:
    """Every file the routing experiments read, name -> sha256."""
    texts = [*(paths.PROMPTS / f"{name}.jsonl" for name in PROMPT_SETS), CALIBRATION]
    return {model: model_digest(model) for model in models} | {path.name: sha256_of(path) for path in texts}


def inputs_of(context: Context) -> dict[str, str]:
    """The `inputs` of an experiment that reads its models and the texts."""
    return inputs(context.models)


def rows_per_model(context: Context, measure: Callable[..., jobs.Rows]) -> pd.DataFrame:
    """One job per model, `measure(model, digest, seed)`; `digest` names what it reads in the cache key.

    The longest job begins first, so that none is left over at the end; rows are in the order of the models.
    """
    work = [
        jobs.Job(model, measure, {"model": model, "digest": inputs_digest(model), "seed": context.seed}, _routed(model))
        for model in context.models
    ]
    rows = pd.DataFrame(jobs.run(context, sorted(work, key=lambda job: job.cost, reverse=True)))
    names = [shown_name(model) for model in context.models]
    return rows.sort_values("model", key=lambda column: column.map(names.index), kind="stable", ignore_index=True)


def _routed(model: str) -> float:
    """Experts that a token of the original visits: most of these jobs cost in proportion to it."""
    anatomy = priced_as(model)
    return float(anatomy.moe_layers * anatomy.top_k)


def inputs_digest(model: str) -> str:
    """sha256 over everything a routing job on `model` reads; it names the job's rows in the cache."""
    return hashlib.sha256(repr(inputs([model])).encode()).hexdigest()


@lru_cache(maxsize=1)  # the jobs of one model follow each other, and none changes it
def ask(model: str, requests_per_set: int, seed: int) -> Question:
    """Load a model and the requests it is to read."""
    source = load(model, **placement(model))
    return Question(source, tokenize(select(requests_per_set, seed=seed), source.tokenizer, MAX_TOKENS), seed)


def quantized(question: Question, quantizer: str, cache_dir: Path) -> QuantizedExperts:
    """The quantised experts, made if the cache does not hold them."""
    ids = calibration_ids(question.source.tokenizer, seed=question.seed)
    return load_quantized(quantize(question.source, quantizer, ids, cache_dir / "quantized"), question.source)


def reference_trace(question: Question, cache_dir: Path) -> Trace:
    """Teacher-forced routing of the unquantised model; kept in the cache for whoever asks the same next."""
    return _kept_trace(question, [MAX_TOKENS], cache_dir, capture)


def decode_trace(question: Question, cache_dir: Path, temperature: float) -> Trace:
    """Routing of the unquantised model while it continues every request of PREFIX_TOKENS tokens or more; kept as well.

    Raises:
        UserError: no request is long enough, or the continuation exceeds the context.
    """
    long_enough = question.tokens.at_least(PREFIX_TOKENS)
    if not long_enough.requests:
        raise UserError(f"no request has the {PREFIX_TOKENS} tokens a continuation starts from: select longer prompts")
    how = {"prefix_tokens": PREFIX_TOKENS, "new_tokens": NEW_TOKENS, "temperature": temperature}
    asked = [how, question.seed if temperature else None]
    return _kept_trace(replace(question, tokens=long_enough), asked, cache_dir, partial(decode, **how))


def _kept_trace(
    question: Question,
    how: list,
    cache_dir: Path,
    take: Callable[[PreTrainedModel, TokenizedRequests, Origin], Trace],
) -> Trace:
    """The trace that `take` gives, from the cache if it lies there; `how` is all that decides it beside the question."""
    tokens = [ids.tolist() for ids in question.tokens.ids]
    asked = [question.source.digest, tokens, *how, code_digest("specter-table1")]
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    path = cache_dir / "traces" / f"{question.source.name}-{key}.parquet"
    if not path.exists():
        write_trace(take(question.source.model, question.tokens, question.origin()), path)
    return read_trace(path, model_digest=question.source.digest)


def model_type(model: str) -> str:
    """The architecture of a model, as config.json names it."""
    return read_config(resolve(model)).model_type


def family(model: str) -> str:
    """Which of the paper's models a zoo model or checkpoint stands for: "qwen", "phi", "deepseek", or its own type."""
    return FAMILIES.get(model_type(model), model_type(model))
