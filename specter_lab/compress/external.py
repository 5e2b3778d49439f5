"""Quantisers that run outside: gptqmodel and autoawq, each job a process of its own (why: see `compress.job`)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from torch import Tensor

from specter_lab.compress.job import ERROR, PROGRESS, JobReport, read_report
from specter_lab.errors import UserError
from specter_lab.paths import ROOT

AUTOAWQ_PYTHON = ROOT / ".venv-autoawq" / "bin" / "python"
_AUTOAWQ_MODEL_TYPES = ("deepseek_v2",)  # of the zoo's architectures the one that autoawq 0.2.9 knows


@dataclass(frozen=True)
class _Job:
    module: str
    method: str


_JOBS = {
    "gptqmodel-gptq": _Job("specter_lab.compress.gptqmodel_job", "gptq"),
    "gptqmodel-awq": _Job("specter_lab.compress.gptqmodel_job", "awq"),
    "autoawq": _Job("specter_lab.compress.autoawq_job", "awq"),
}


def _missing(quantizer: str) -> str | None:
    if quantizer == "autoawq":
        found = AUTOAWQ_PYTHON.exists()
        return None if found else "autoawq needs an environment of its own, `make setup-autoawq` makes it"
    return None if find_spec("gptqmodel") else "gptqmodel is not installed, `make setup` installs it"


def not_run_reason(quantizer: str, model_type: str) -> str | None:
    """Why `quantizer` cannot run here on a model of `model_type`, as it should stand in a table; None if it can.

    Args:
        quantizer: "gptqmodel-gptq", "gptqmodel-awq" or "autoawq".
        model_type: as in config.json.
    """
    if quantizer == "autoawq" and model_type not in _AUTOAWQ_MODEL_TYPES:
        return f"not run: autoawq does not know {model_type} as it is used here"
    missing = _missing(quantizer)
    return missing and f"not run: {missing}"


def _command(quantizer: str, source: Path, destination: Path, bits: int, calibration: Path, threads: int) -> list[str]:
    python = str(AUTOAWQ_PYTHON) if quantizer == "autoawq" else sys.executable
    job = _JOBS[quantizer]
    return [
        python, "-m", job.module, str(source), str(destination), "--method", job.method, "--bits", str(bits),
        "--calibration", str(calibration), "--threads", str(threads),
    ]  # fmt: skip


def _follow(command: list[str], folder: str, log: Path, threads: int, on_progress: Callable[[str], None]) -> str | None:
    """Run `command` in `folder`, copy its output to `log`; returns what went wrong, None if nothing did."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    last_line, error = "no output", None
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        ) as process,
    ):  # fmt: skip
        try:
            for line in process.stdout:
                file.write(line)
                if line.startswith(PROGRESS):
                    on_progress(line.removeprefix(PROGRESS).strip())
                elif line.startswith(ERROR):
                    error = line.removeprefix(ERROR).strip()
                last_line = line.strip() or last_line
        except BaseException:  # Ctrl-C included: no job outlives its parent
            process.kill()
            raise
    if process.returncode == 0:
        return None
    if process.returncode < 0 and error is None:
        return f"it was killed by signal {-process.returncode}, which is what happens when memory runs out"
    return error or last_line


def run_job(
    quantizer: str,
    source: Path,
    destination: Path,
    *,
    bits: int,
    calibration: Tensor,
    threads: int = 1,
    on_progress: Callable[[str], None] = lambda text: None,
) -> JobReport:
    """Quantise the routed experts of a checkpoint with an outside quantiser.

    The same arguments give the same weights, byte for byte. The log is kept beside the destination.

    Args:
        quantizer: "gptqmodel-gptq", "gptqmodel-awq" or "autoawq".
        source: checkpoint folder.
        destination: folder to make; it appears only when it is complete.
        bits: 8, 4, 3 or 2 for GPTQ, 4 for AWQ.
        calibration: [N, T] token ids.
        threads: CPU threads of one matrix product; two jobs of one thread side by side use two cores best.
        on_progress: called with a short text whenever a layer is done.

    Raises:
        UserError: the destination is there already, the quantiser is not installed, or it failed; the message holds
            the last line of its log.
    """
    if missing := _missing(quantizer):
        raise UserError(missing)
    if destination.exists():
        raise UserError(f"{destination} is there already: remove it, or choose another destination")
    destination.parent.mkdir(parents=True, exist_ok=True)
    log = destination.with_name(destination.name + ".log").resolve()
    with tempfile.TemporaryDirectory() as folder:
        ids = Path(folder) / "calibration.npy"
        np.save(ids, calibration.numpy())
        command = _command(quantizer, source.resolve(), destination.resolve(), bits, ids, threads)
        problem = _follow(command, folder, log, threads, on_progress)
    if problem is not None:
        raise UserError(f"{quantizer} with {bits} bits on {source.name} stopped: {problem} (log: {log})")
    return read_report(destination)
