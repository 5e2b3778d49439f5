"""The registry of quantisers, and the cache of what they made."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

import torch
from gguf import GGMLQuantizationType as GgmlType
from torch import Tensor
from tqdm.auto import tqdm

from specter_lab.compress import coverage, external, gptq
from specter_lab.compress.cache import build_once, is_whole
from specter_lab.compress.calibration import calibration_ids, digest_of
from specter_lab.compress.coverage import Coverage, of_counts
from specter_lab.compress.gguf import fallbacks, write_gguf
from specter_lab.compress.gptq import DAMP
from specter_lab.compress.gptq_checkpoint import write_gptq
from specter_lab.compress.grid import GROUP, CodedBank
from specter_lab.compress.quantizer import Outcome, Quantizer
from specter_lab.compress.report import Report, write_report
from specter_lab.compress.sequential import quantize_in_order
from specter_lab.errors import UserError
from specter_lab.models.load import (
    LoadedModel,
    checkpoint_digest,
    load,
    placement,
    read_config,
    read_tokenizer,
    resolve,
    shown_name,
)

HERE = Path(__file__).parent


# Files of this folder that define QUANTIZERS of their own, in the order tables show them.
FAMILIES = ("rtn",)


def _write_gptq_batched(source: LoadedModel, ids: Tensor, folder: Path, *, bits: int) -> Outcome:
    counts: dict[int, Tensor] = {}

    def banks() -> Iterator[CodedBank]:
        for coded, tokens in quantize_in_order(source, ids, partial(gptq.quantize_bank, bits=bits)):
            counts[coded.layer] = tokens
            yield coded

    write_gptq(source, banks(), bits, GROUP, "specter_lab batched GPTQ", folder)
    return Outcome(of_counts(counts, ids.numel(), fallback="rounded to nearest"), ())


def _write_gguf(source: LoadedModel, _ids: Tensor, folder: Path, *, kind: GgmlType) -> Outcome:
    write_gguf(source, kind, folder)
    return Outcome(None, fallbacks(source, kind))


def _write_outside(source: LoadedModel, ids: Tensor, folder: Path, *, job: str, bits: int) -> Outcome:
    made = folder.with_suffix(".job")  # beside the folder, so that the log of a job that fails outlives it
    shutil.rmtree(made, ignore_errors=True)
    layers = source.model.config.num_hidden_layers
    with tqdm(total=layers, desc=f"quantising {source.name} by {job}", unit="layer") as bar:
        report = external.run_job(
            job, source.path, made, bits=bits, calibration=ids.cpu(), on_progress=lambda _layer: bar.update()
        )
    for file in made.iterdir():
        file.rename(folder / file.name)
    made.rmdir()
    counts = {layer: torch.tensor(row) for layer, row in report.tokens_per_expert.items()}
    rounded = [f"{len(report.fallback)} matrices rounded to nearest, e.g. {name}" for name in report.fallback[:1]]
    covered = of_counts(counts, report.calibration_tokens, fallback="rounded to nearest")
    return Outcome(covered, (report.notes, *rounded))


def _gptq_batched(bits: int) -> Quantizer:
    parameters = {"group": GROUP, "symmetric": True, "damp": DAMP}
    write = partial(_write_gptq_batched, bits=bits)
    return Quantizer(f"gptq-int{bits}-batched", bits, parameters, ("torch", "transformers"), write)


def _gguf(kind: GgmlType, bits: int) -> Quantizer:
    parameters = {"type": kind.name, "importance_matrix": False}
    write = partial(_write_gguf, kind=kind)
    return Quantizer(f"gguf-{kind.name.lower()}", bits, parameters, ("gguf", "libggml-python"), write)


def _gptqmodel_gptq(bits: int) -> Quantizer:
    parameters = {"group": GROUP, "symmetric": True, "damp": DAMP, "act_group_aware": False}
    write = partial(_write_outside, job="gptqmodel-gptq", bits=bits)
    packages = ("gptqmodel", "defuser", "torch", "transformers")
    return Quantizer(f"gptq-int{bits}", bits, parameters, packages, write, "gptqmodel-gptq")


def _awq(name: str, job: str, packages: tuple[str, ...]) -> Quantizer:
    parameters = {"group": "greatest power of two up to 128 that divides the row", "symmetric": False}
    return Quantizer(name, 4, parameters, packages, partial(_write_outside, job=job, bits=4), job)


QUANTIZERS = {
    row.name: row
    for row in (
        _gptqmodel_gptq(8), _gptqmodel_gptq(4), _gptqmodel_gptq(3), _gptq_batched(4),
        _awq("awq-int4", "gptqmodel-awq", ("gptqmodel", "defuser", "torch", "transformers")),
        _awq("autoawq-int4", "autoawq", ("autoawq", "torch", "transformers")),
        _gguf(GgmlType.Q8_0, 8), _gguf(GgmlType.Q6_K, 6), _gguf(GgmlType.Q5_K, 5), _gguf(GgmlType.Q4_K, 4),
        _gguf(GgmlType.Q4_0, 4), _gguf(GgmlType.Q3_K, 3), _gguf(GgmlType.Q2_K, 2),
        *(row for name in FAMILIES for row in import_module(f"specter_lab.compress.{name}").QUANTIZERS),
    )
}  # fmt: skip


def not_run_reason(quantizer_name: str, model_type: str) -> str | None:
    """Why a quantiser cannot run here on an architecture, as it should stand in a table; None if it can."""
    job = QUANTIZERS[quantizer_name].job
    return external.not_run_reason(job, model_type) if job else None


def _versions(quantizer: Quantizer) -> dict[str, str]:
    """Versions of the packages a quantiser depends on, in the environment it runs in."""
    own = external.AUTOAWQ_PYTHON.parents[1].glob("lib/python*/site-packages")
    path = list(map(str, own)) if quantizer.job == "autoawq" else sys.path
    versions = {}
    for package in quantizer.packages:
        installed = next(iter(distributions(name=package, path=path)), None)
        if installed is None:
            raise UserError(f"{quantizer.name} needs the package {package}, which is not installed: run `make setup`")
        versions[package] = installed.version
    return versions


@cache
def _code_digest() -> str:
    """sha256 over this package and models/: what they make is made again when they change."""
    files = sorted(file for folder in (HERE, HERE.parent / "models") for file in folder.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class _Source(NamedTuple):
    """What of a model decides what is made from it."""

    name: str
    digest: str
    dtype: str


def _identity(source: LoadedModel) -> _Source:
    return _Source(source.name, source.digest, str(source.model.dtype))


def _entry(cache_dir: Path, source: _Source, what: str, **identity: object) -> Path:
    """The folder of something made from `source`, named by everything that decides its content."""
    identity |= {"what": what, "model": source.digest, "dtype": source.dtype, "code": _code_digest()}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return cache_dir / f"{source.name.replace('/', '--')}-{what}-{key[:16]}"


def _checkpoint(cache_dir: Path, source: _Source, quantizer: Quantizer, calibration: str) -> Path:
    """Where the checkpoint of a quantiser that can run here is, or will be."""
    identity = {"parameters": quantizer.parameters, "calibration": calibration, "versions": _versions(quantizer)}
    return _entry(cache_dir, source, quantizer.name, bits=quantizer.bits, **identity)


def _runnable(quantizer_name: str, model: str, model_type: str) -> Quantizer:
    if quantizer_name not in QUANTIZERS:
        raise UserError(f"no quantiser '{quantizer_name}': choose one of {', '.join(QUANTIZERS)}")
    if reason := not_run_reason(quantizer_name, model_type):
        raise UserError(f"{quantizer_name} on {model} {reason}")
    return QUANTIZERS[quantizer_name]


def _source_coverage(source: LoadedModel, ids: Tensor, cache_dir: Path) -> Coverage:
    """Coverage of the full-precision model, measured once for all quantisers that do not calibrate."""

    def build(folder: Path) -> None:
        measured = coverage.measure(source, ids, fallback="nothing: every expert is quantised without calibration")
        (folder / "coverage.json").write_text(json.dumps(measured.to_json()))

    folder = build_once(_entry(cache_dir, _identity(source), "coverage", calibration=digest_of(ids)), build)
    return Coverage.from_json(json.loads((folder / "coverage.json").read_text()))


def quantize(source: LoadedModel, quantizer_name: str, ids: Tensor, cache_dir: Path) -> Path:
    """The folder of a quantised checkpoint, made if the cache does not hold it; `checkpoint.load_quantized` reads it.

    Args:
        source: the full-precision model.
        quantizer_name: key of `QUANTIZERS`.
        ids: [N, T] token ids of the calibration text.
        cache_dir: where checkpoints are kept, named by content; made if missing.

    Raises:
        UserError: unknown quantiser, one that cannot run here (`not_run_reason`), or the disk is full.
    """
    quantizer = _runnable(quantizer_name, source.name, source.model.config.model_type)
    calibration = digest_of(ids)

    def build(folder: Path) -> None:
        start = time.monotonic()
        outcome = quantizer.write(source, ids, folder)
        seconds = round(time.monotonic() - start, 2)
        covered = outcome.coverage or _source_coverage(source, ids, cache_dir)
        report = Report(
            quantizer.name, quantizer.bits, quantizer.parameters, source.name, source.digest, calibration,
            _versions(quantizer), seconds, covered, outcome.fallbacks,
        )  # fmt: skip
        write_report(report, folder)

    return build_once(_checkpoint(cache_dir, _identity(source), quantizer, calibration), build)


def quantized(model: str, quantizer_name: str, cache_dir: Path) -> Path:
    """As `quantize`, with the project's calibration text, of a zoo model, folder or hub id; it is loaded only if the cache has to
    be filled.

    Raises:
        UserError: as `quantize`, or no such model.
    """
    folder = resolve(model)
    config = read_config(folder)
    quantizer = _runnable(quantizer_name, model, config.model_type)
    ids = calibration_ids(read_tokenizer(folder, config.vocab_size))
    source = _Source(shown_name(model), checkpoint_digest(folder), str(placement(model)["dtype"]))
    made = _checkpoint(cache_dir, source, quantizer, digest_of(ids))
    return made if is_whole(made) else quantize(load(model, **placement(model)), quantizer_name, ids, cache_dir)
