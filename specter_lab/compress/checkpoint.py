"""One reader for every quantised checkpoint: GPTQ and AWQ safetensors and GGUF files, made here or downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specter_lab.compress.awq import folded_scales, undo_folding
from specter_lab.compress.cache import verify_manifest
from specter_lab.compress.coverage import Coverage
from specter_lab.compress.gguf import open_gguf
from specter_lab.compress.packed import open_packed
from specter_lab.compress.report import read_report
from specter_lab.compress.stored import assemble
from specter_lab.errors import UserError
from specter_lab.models.experts import ExpertBank
from specter_lab.models.load import LoadedModel, resolve


@dataclass(frozen=True)
class QuantizedExperts:
    """The routed experts of a whole model after quantisation."""

    quantizer: str  # registry name, or what a downloaded checkpoint says of itself, e.g. "gptq-int4"
    banks: tuple[ExpertBank, ...]  # float32 effective weights, one per MoE layer
    bits_per_weight: float  # measured: bytes on disk (codes, scales, zero points) x 8 / weights
    coverage: Coverage | None  # None: a download, made from a calibration text unknown here
    notes: tuple[str, ...]  # fallbacks used, and quantised tensors that were left alone


def load_quantized(path: str | Path, source: LoadedModel) -> QuantizedExperts:
    """Read the routed experts of a quantised checkpoint of `source`.

    Args:
        path: folder, `.gguf` file, hub id (`org/name`), or a GGUF file on the hub (`org/name/file.gguf`).
        source: the full-precision model; layers, experts and shapes must be its.

    Raises:
        UserError: not found, damaged, altered, incomplete, of another model, or with a quantised router.
    """
    found = locate(str(path))
    report = None
    if found.is_dir():
        verify_manifest(found)
        report = read_report(found)
        found = _only_gguf(found) or found
    stored = open_packed(found, source) if found.is_dir() else open_gguf(found)
    banks, stored_bytes = assemble(stored, source, str(found))
    if stored.quantizer.startswith("awq"):
        banks = tuple(undo_folding(banks, folded_scales(source.path, found)))
    return QuantizedExperts(
        quantizer=report.quantizer if report else stored.quantizer,
        banks=banks,
        bits_per_weight=8 * stored_bytes / sum(bank.num_weights for bank in banks),
        coverage=report.coverage if report else None,
        notes=stored.notes + (report.fallbacks if report else ()),
    )


def _only_gguf(folder: Path) -> Path | None:
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{folder} holds {len(files)} GGUF files: give the path of one, e.g. {files[0]}")
    return files[0] if files else None


def locate(name: str) -> Path:
    """The folder or GGUF file that `name` means, downloaded if it is on the model hub.

    Raises:
        UserError: there is none.
    """
    if Path(name).exists():
        return Path(name)
    if "/" not in name or name.startswith((".", "/")):
        kind = "GGUF file" if name.endswith(".gguf") else "quantised checkpoint"
        raise UserError(f"no {kind} {name}: give its path, or the hub id of one ('org/name', 'org/name/file.gguf')")
    if not name.endswith(".gguf"):
        return resolve(name)
    repository, _, file_name = name.rpartition("/")
    if repository.count("/") != 1:
        raise UserError(f"no GGUF file {name}: give its path, or 'org/name/file.gguf' for one on the model hub")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, file_name))
    except Exception as error:  # the hub client raises a dozen types for "not reachable"
        raise UserError(
            f"cannot fetch '{name}' from the model hub ({type(error).__name__}): download it where there is a network "
            f"and give the file's path instead"
        ) from error
