"""What a quantiser is: one row of the registry in `quantizers.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from specter_lab.compress.coverage import Coverage
from specter_lab.models.load import LoadedModel


@dataclass(frozen=True)
class Outcome:
    """What a quantiser has to say beside the checkpoint it wrote."""

    coverage: Coverage | None  # None: calibration was not used
    fallbacks: tuple[str, ...]  # one sentence each


@dataclass(frozen=True)
class Quantizer:
    """One row of the registry."""

    name: str
    bits: int
    parameters: dict  # all that changes the result, beside model and calibration
    packages: tuple[str, ...]  # whose versions change the result
    write: Callable[[LoadedModel, Tensor, Path], Outcome]  # (source, calibration ids [N, T], existing folder)
    job: str | None = None  # name in `compress.external` of a quantiser that runs as a process of its own
