"""What the quantiser jobs share: arguments, calibration tokens, a checkpoint that appears whole, the report.

A job is a process of its own, because the packages it runs cannot share one: gptqmodel changes classes of transformers
for every model loaded afterwards, and autoawq needs an older transformers. This file is imported in both environments,
so it uses numpy, safetensors and the standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from specter_lab.errors import UserError
from specter_lab.files import whole_folder

REPORT = "report.json"
CALIBRATION_KEY = "input_ids"  # tensor name in a .safetensors calibration file
PROGRESS = "progress: "  # start of the lines that the parent shows; the others go to the log only
ERROR = "error: "  # start of the line that says what went wrong
FAILED = 2  # exit status
PARENT_CHECK_S = 1
GROUP = 128  # inputs that share a scale, where the rows allow it
AWQ_CLIP_TOKENS = 128  # of 512 by default: searching where to clip is half of AWQ's time and costs in proportion
AWQ_CLIP_BLOCK_ROWS = 64  # both packages search clipping for blocks of so many output rows


@dataclass(frozen=True)
class JobReport:
    """What a quantiser did, written beside the checkpoint as report.json."""

    quantizer: str
    bits: int
    group_sizes: dict[str, int]  # "gate", "up", "down" -> inputs that share a scale
    packages: dict[str, str]  # name -> version
    seconds: float  # quantising and saving, imports and loading not counted
    calibration_tokens: int
    tokens_per_expert: dict[int, list[int]]  # decoder layer -> tokens that each expert got
    fallback: list[str]  # matrices quantised without calibration: plain rounding to nearest
    notes: str  # what differs from the quantiser's textbook form, and why

    @property
    def starved(self) -> list[tuple[int, int]]:
        """(decoder layer, expert) pairs that no calibration token reached."""
        return [(layer, e) for layer, counts in self.tokens_per_expert.items() for e, n in enumerate(counts) if n == 0]


def read_report(folder: Path) -> JobReport:
    """The report of a finished job."""
    fields = json.loads((folder / REPORT).read_text())
    fields["tokens_per_expert"] = {int(layer): counts for layer, counts in fields["tokens_per_expert"].items()}
    return JobReport(**fields)


def write_report(folder: Path, report: JobReport) -> None:
    (folder / REPORT).write_text(json.dumps(asdict(report), indent=1) + "\n")


def awq_group(in_features: int) -> int:
    """Inputs that share a scale in AWQ, whose packed format has whole groups only: a divisor of 128 and of the row."""
    return math.gcd(GROUP, in_features)


def package_versions(*names: str) -> dict[str, str]:
    return {name: version(name) for name in names}


def job_arguments(description: str, methods: tuple[str, ...]) -> argparse.Namespace:
    """Command line of a job: source, destination, method, bits, calibration, threads."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("source", type=Path, help="checkpoint to quantise")
    parser.add_argument("destination", type=Path, help="folder to make; must not exist")
    parser.add_argument("--method", choices=methods, required=True)
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--calibration", type=Path, required=True, help="[N, T] token ids, .npy or .safetensors")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of one matrix product")
    return parser.parse_args()


def read_calibration(path: Path, vocab_size: int) -> np.ndarray:
    """Calibration token ids [N, T].

    Raises:
        UserError: the file holds no two-dimensional array of integers, or tokens that a model of `vocab_size` lacks.
    """
    ids = load_file(path).get(CALIBRATION_KEY) if path.suffix == ".safetensors" else np.load(path)
    if ids is None or ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"calibration file {path} holds no integers [sequences, tokens]"
                        f" (.npy, or .safetensors with a tensor '{CALIBRATION_KEY}'): write it anew")  # fmt: skip
    unknown = ids[(ids < 0) | (ids >= vocab_size)]
    if unknown.size:
        raise UserError(f"calibration file {path} holds token {unknown[0]}, the model has {vocab_size} tokens: make it "
                        f"with the model's own tokenizer")  # fmt: skip
    return ids


@contextmanager
def appearing(destination: Path) -> Iterator[Path]:
    """A folder to write into that takes its final name only when the block ends well.

    Raises:
        UserError: the destination is there already.
    """
    if destination.exists():
        raise UserError(f"{destination} is there already: remove it, or choose another destination")
    with whole_folder(destination) as folder:
        yield folder


def show_progress(text: str) -> None:
    print(f"\n{PROGRESS}{text}", flush=True)


def _end_with(parent: int) -> None:
    """End this process when `parent` is gone, killed as it may be: nobody waits for the result any more."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(FAILED)


def exit_after(job: Callable[[], None]) -> None:
    """Run a job's main function; a failure ends the process with its sentence on a line of its own, for the parent."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        job()
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        sentence = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        print(f"\n{ERROR}{' '.join(sentence.split())}", flush=True)
        sys.exit(FAILED)
