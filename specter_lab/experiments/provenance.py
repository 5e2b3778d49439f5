"""Where a result comes from: code, machine, packages, inputs, command and time."""

from __future__ import annotations

import hashlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

import psutil

from specter_lab import paths
from specter_lab.experiments.context import Context
from specter_lab.experiments.registry import TIMED, find

PACKAGES = (
    "torch", "transformers", "safetensors", "tokenizers", "numpy", "pandas", "pyarrow", "gptqmodel", "defuser", "gguf",
    "libggml-python", "datasets", "sacrebleu", "lz4", "zstandard",
)  # fmt: skip
MEASURING_PACKAGES = ("models", "compress", "measure", "plan", "engine")


def code_digest(experiment: str) -> str:
    """sha256 over the source that can change an experiment's values."""
    return source_digest(find(experiment).module)


@cache
def source_digest(module: str) -> str:
    """sha256 over the source of the measuring packages and of an experiment module's folder, and package versions."""
    own_folder = Path(find_spec(module).origin).parent
    return _digest([*_sources(MEASURING_PACKAGES), *sorted(own_folder.glob("*.py"))])


@cache
def recording_digest() -> str:
    """sha256 over the source that can change what is recorded of a model, policies and engines left out."""
    return _digest(_sources(("models", "compress", "measure")))


def _sources(packages: Iterable[str]) -> list[Path]:
    folders = [paths.ROOT / "specter_lab" / part for part in packages]
    return [file for folder in folders for kind in ("*.py", "*.toml") for file in sorted(folder.rglob(kind))]


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256(repr(sorted(_packages().items())).encode())
    for file in files:
        digest.update(f"{file.parent.name}/{file.name}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def gpu_name() -> str | None:
    """Name of the first CUDA device, or None."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def describe(context: Context, inputs: Mapping[str, str], wall_s: float) -> dict:
    """Everything a reader needs to judge or repeat a run, without this machine's paths."""
    from specter_lab.models.load import shown_name  # late, as in `local_processes.process_count`

    return {
        "experiment": context.experiment,
        "tier": context.tier,
        "models": [shown_name(model) for model in context.models],
        "seed": context.seed,
        "runner": context.runner,
        "command": _command(context),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_s": round(wall_s, 1),
        "beside_others": _beside_others(context),
        "peak_process_gib": round(_peak_process_kib() / 2**20, 2),
        "question": question_digest(context, inputs),
        "code_sha256": code_digest(context.experiment),
        **_version(),
        "inputs": {shown_name(name): digest for name, digest in inputs.items()},
        "machine": _machine(),
        "packages": _packages(),
    }


def _beside_others(context: Context) -> bool:
    """Whether the rows shared cores with the next experiment's; those that are timed share a process, one after the other."""
    return context.shared is not None and context.experiment not in TIMED


def question_digest(context: Context, inputs: Mapping[str, str]) -> str:
    """Equal for two runs that must give the same rows: experiment, tier, seed, models, inputs and code."""
    asked = (context.experiment, context.tier, context.seed, context.models)
    question = (*asked, sorted(inputs.items()), code_digest(context.experiment))
    return hashlib.sha256(repr(question).encode()).hexdigest()


def _command(context: Context) -> str:
    words = ["specter-lab", "reproduce", context.experiment, "--tier", context.tier, "--seed", str(context.seed)]
    if context.folder_name != context.tier:
        from specter_lab.models.load import shown_name

        words += ["--models", *map(shown_name, context.models)]
    return shlex.join(words)


def _peak_process_kib() -> int:
    """The most memory that one process has held: this one, those that ended, or those that live on for the next experiment."""
    peaks = [getrusage(who).ru_maxrss for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    for process in psutil.Process().children(recursive=True):
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:  # ended meanwhile, or a system that does not say
            continue
        peaks += map(int, re.findall(r"VmHWM:\s+(\d+) kB", status))
    return max(peaks)


def _machine() -> dict:
    from specter_lab.measure.host_speed import cpu_name, usable_cores

    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpu_name(),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
    }


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _version() -> dict:
    """Commit and whether files differ from it; None where this is no checkout, even inside a repository of another."""
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != paths.ROOT:
        return {"commit": None, "uncommitted_changes": None}
    changes = _git("status", "--porcelain")
    return {"commit": _git("rev-parse", "HEAD"), "uncommitted_changes": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    """Output of a git command in the project's folder; None where that fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=paths.ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
