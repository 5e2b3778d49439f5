"""Named hardware profiles: the numbers of a machine that the cost model needs, each with its source.

A profile is a file `profiles/<name>.toml`; `read_profile("a100-40gb-pcie4")` reads it. To simulate another machine, add
a file with the same fields. Sizes are bytes; GB are 10^9 bytes, as in data sheets.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from specter_lab.errors import UserError

PROFILES = Path(__file__).parent / "profiles"
PAPERS_GPU = "a100-40gb-pcie4"  # Specter, section Setting


@dataclass(frozen=True)
class Profile:
    """One GPU and its link to host memory."""

    name: str
    gpu: str
    link: str
    memory_gb: float
    memory_bandwidth_gb_s: float
    bf16_tflop_s: float
    launch_us: float  # host time per operator
    h2d_bytes: tuple[int, ...]  # sizes of single copies, ascending
    h2d_gb_s: tuple[float, ...]  # bandwidth at those sizes
    sources: dict[str, str]  # field -> where its number comes from

    def h2d_ms(self, num_bytes: float) -> float:
        """Time of one host-to-device copy; between the measured sizes linear in time, beyond the largest at its
        bandwidth, and never below the time of the smallest."""
        times_ms = np.array(self.h2d_bytes) / np.array(self.h2d_gb_s) * 1e-6
        if num_bytes > self.h2d_bytes[-1]:
            return float(num_bytes / self.h2d_gb_s[-1] * 1e-6)
        return float(np.interp(num_bytes, self.h2d_bytes, times_ms))


@cache
def read_profile(name: str = PAPERS_GPU) -> Profile:
    """The profile `name`.

    Raises:
        UserError: there is no such profile, or its file lacks a field.
    """
    path = PROFILES / f"{name}.toml"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in PROFILES.glob("*.toml")))
        raise UserError(f"no hardware profile '{name}': choose from {known}, or add {path.name} beside them")
    fields = tomllib.loads(path.read_text(encoding="utf-8"))
    names = ("memory_gb", "memory_bandwidth_gb_s", "bf16_tflop_s", "launch_us")
    try:
        numbers = {field: fields[field]["value"] for field in names}
        sources = {field: fields[field]["source"] for field in names}
        curve = sorted((point["bytes"], point["gb_s"], point["source"]) for point in fields["h2d"])
        sources |= {f"h2d at {size} bytes": source for size, _, source in curve}
        sizes, bandwidths, _ = zip(*curve)
        return Profile(name, fields["gpu"], fields["link"], **numbers, h2d_bytes=sizes, h2d_gb_s=bandwidths,
                       sources=sources)  # fmt: skip
    except (KeyError, ValueError) as error:
        raise UserError(f"hardware profile {path.name} lacks {error}: a100-40gb-pcie4.toml shows the fields") from error
