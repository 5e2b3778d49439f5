"""`specter-lab doctor`: what of the project is here, how fast this machine is, and its hardware profile.

    report = examine(on_step=print)                 # under a minute
    print(report.to_text())
    profile = read_profile("this-machine")          # what it wrote

Without a GPU the processor stands in for it: its matrix products, its memory, and copies from memory to memory. On a busy machine
the numbers are low: report and profile say so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specter_lab import paths
from specter_lab.measure import installation
from specter_lab.measure.installation import Part
from specter_lab.plan.hardware import CURVES, THIS_MACHINE, Cpu, Curve, Profile, own_profiles, write_profile

if TYPE_CHECKING:  # torch may be what is missing
    from specter_lab.measure.disk_speed import DiskSpeed
    from specter_lab.measure.gpu_speed import GpuSpeed
    from specter_lab.measure.host_speed import HostSpeed, Load, Rate

CURVE_TITLES = {"h2d": "host to device", "d2h": "device to host", "disk_read": "disk read"}


@dataclass(frozen=True)
class Speeds:
    """Everything that was measured."""

    host: HostSpeed
    disk: DiskSpeed
    gpu: GpuSpeed | None
    cpu_name: str
    cores: int
    memory_bytes: int
    load: Load  # before anything was measured


@dataclass(frozen=True)
class Report:
    """What `specter-lab doctor` says. Without torch nothing is measured."""

    parts: list[Part]
    speeds: Speeds | None = None
    profile: Profile | None = None
    file: Path | None = None  # where the profile was written
    seconds: float = 0.0

    @property
    def works(self) -> bool:
        return installation.works(self.parts)

    def to_json(self) -> str:
        return json.dumps(
            {
                "works": self.works,
                "missing": {part.name: part.missing for part in self.parts if part.missing},
                "parts": [asdict(part) for part in self.parts],
                "measured": self.speeds and asdict(self.speeds),
                "profile": self.file and str(self.file),
                "seconds": round(self.seconds, 1),
            },
            indent=2,
        )

    def to_text(self) -> str:
        lines = ["Installed", *map(_part_line, self.parts)]
        if self.speeds:
            lines += ["", f"This machine, measured in {self.seconds:.0f} s", *_speed_lines(self.speeds)]
            if self.speeds.load.busy:
                lines += [
                    "",
                    f"  {_load_words(self.speeds.load)}: numbers are low, run it again when nothing else runs",
                ]
            lines += ["", *_curve_lines(self.profile), "", f"Written as profile '{THIS_MACHINE}': {self.file}"]
        lacking = "; ".join(part.missing for part in self.parts if part.needed and part.missing)
        verdict = "specter_lab can work here." if self.works else f"specter_lab cannot work here. Missing: {lacking}."
        return "\n".join([*lines, "", verdict])


def examine(on_step: Callable[[str], None], **effort: Mapping) -> Report:
    """Look at the installation, measure the machine, write its profile into the folder of own profiles.

    Args:
        on_step: told what is measured next.
        effort: `host`, `disk`, `gpu`: keyword arguments of the three measurements.

    Raises:
        UserError: the disk has no room for the file that is read.
    """
    on_step("the installation")
    parts = installation.parts()
    try:
        import torch  # noqa: F401  what everything below is measured with
    except ImportError:
        return Report(parts)
    start = time.perf_counter()
    speeds = measure(on_step, **effort)
    profile = profile_of(speeds)
    file = own_profiles() / f"{THIS_MACHINE}.toml"
    write_profile(profile, file)
    return Report(parts, speeds, profile, file, time.perf_counter() - start)


def measure(on_step: Callable[[str], None], **effort: Mapping) -> Speeds:
    """Host, GPU and the disk that holds the cache."""
    import psutil

    from specter_lab.measure.disk_speed import measure_disk
    from specter_lab.measure.gpu_speed import measure_gpu
    from specter_lab.measure.host_speed import cpu_name, load, measure_host, usable_cores

    before = load()
    host = measure_host(on_step, **effort.get("host", {}))
    gpu = measure_gpu(on_step, **effort.get("gpu", {}))
    on_step("disk reads")
    disk = measure_disk(paths.CACHE, **effort.get("disk", {}))
    return Speeds(host, disk, gpu, cpu_name(), usable_cores(), psutil.virtual_memory().total, before)


def profile_of(speeds: Speeds) -> Profile:
    """The hardware profile of what was measured; its GPU is the processor where there is no other."""
    host, gpu, disk = speeds.host, speeds.gpu, speeds.disk
    by = f"measured: specter-lab doctor, torch {installation.package_version('torch')}"
    by += f", under {_load_words(speeds.load)}" if speeds.load.busy else ""
    of_cpu = (speeds.memory_bytes / 1e9, host.read_gb_s, host.bf16_tflop_s, host.fp32_tflop_s)
    cpu = Cpu(speeds.cpu_name, speeds.cores, *map(_round, of_cpu))
    sources = {
        "cpu.memory_gb": f"{by}, by the operating system",
        "cpu.memory_bandwidth_gb_s": f"{by}, FP32 matrix-vector product on one core or all",
        "cpu.bf16_tflop_s": f"{by}, matrix product on one core or all",
        "cpu.fp32_tflop_s": f"{by}, matrix product on one core or all",
    }
    if gpu:
        numbers = (gpu.memory_gb, gpu.copy_gb_s, gpu.bf16_tflop_s, gpu.operator_us)
        said = ("by the driver", "copy inside the device, bytes read and written", "matrix product",
                f"eager operators of a decoder layer (a bare kernel: {gpu.launch_us:.1f} us)")  # fmt: skip
        names, rates = (gpu.name, gpu.link), {"h2d": gpu.h2d, "d2h": gpu.d2h}
        how = {"h2d": "pinned memory", "d2h": "pinned memory; the smallest with synchronisation"}
    else:
        numbers = (speeds.memory_bytes / 1e9, host.read_gb_s, host.bf16_tflop_s, host.operator_us)
        said = ("the host's memory", "FP32 matrix-vector product on one core or all", "BF16 matrix product on one core or all",
                "eager operators of a decoder layer, on the processor")  # fmt: skip
        names, rates = (f"none, {speeds.cpu_name} instead", "memory to memory"), {"h2d": host.copy, "d2h": host.copy}
        how = dict.fromkeys(("h2d", "d2h"), "memory to memory, for there is no GPU")
    rates["disk_read"], how["disk_read"] = disk.read, f"{disk.method}, one read at a time"
    fields = ("memory_gb", "memory_bandwidth_gb_s", "bf16_tflop_s", "launch_us")
    sources |= {field: f"{by}, {what}" for field, what in zip(fields, said)}
    sources |= {f"{name} at {r.num_bytes} bytes": f"{by}, {how[name]}" for name in CURVES for r in rates[name]}
    return Profile(THIS_MACHINE, *names, **dict(zip(fields, map(_round, numbers))), cpu=cpu, sources=sources,
                   unified_memory=gpu is None, **{name: _curve(rates[name]) for name in CURVES})  # fmt: skip


def _curve(rates: tuple[Rate, ...]) -> Curve:
    return Curve(tuple(rate.num_bytes for rate in rates), tuple(_round(rate.gb_s) for rate in rates))


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _load_words(load: Load) -> str:
    return f"load {load.average:.1f} on {load.cores} cores"


def _part_line(part: Part) -> str:
    state = "ok" if not part.missing else "MISSING" if part.needed else "-"
    return f"  {state:<8} {part.name:<17} {part.missing or part.found}"


def _speed_lines(speeds: Speeds) -> list[str]:
    host, gpu, disk = speeds.host, speeds.gpu, speeds.disk
    rows = [
        ("processor", f"{speeds.cpu_name}, {speeds.cores} cores, {speeds.memory_bytes / 1e9:.1f} GB of memory"),
        ("", f"FP32 {host.fp32_tflop_s * 1e3:.0f}, BF16 {host.bf16_tflop_s * 1e3:.0f} GFLOP/s; memory: "
             f"reads {host.read_gb_s:.1f}, copies {host.copy[-1].gb_s:.1f} GB/s; {host.operator_us:.1f} us a call"),
        ("disk", f"{disk.free_bytes / 1e9:.0f} of {disk.size_bytes / 1e9:.0f} GB free; read with {disk.method}"),
        ("GPU", "none that torch can use" if gpu is None else f"{gpu.name}, {gpu.memory_gb:.0f} GB, {gpu.link}"),
    ]  # fmt: skip
    if gpu:
        launches = f"{gpu.operator_us:.1f} us an eager operator, {gpu.launch_us:.1f} a bare kernel"
        rows.append(("", f"BF16 {gpu.bf16_tflop_s:.0f} TFLOP/s; memory {gpu.copy_gb_s:.0f} GB/s; {launches}"))
    return [f"  {name:<10} {text}" for name, text in rows]


def _curve_lines(profile: Profile) -> list[str]:
    curves = {name: getattr(profile, name) for name in CURVES}
    sizes = sorted({size for curve in curves.values() for size in curve.sizes_bytes})
    at = {name: dict(zip(curve.sizes_bytes, curve.gb_s)) for name, curve in curves.items()}
    lines = ["  GB/s by size" + "".join(f"{CURVE_TITLES[name]:>17}" for name in CURVES)]
    for size in sizes:
        cells = "".join(f"{at[name][size]:>17.2f}" if size in at[name] else " " * 17 for name in CURVES)
        lines.append(f"  {size:>12,}{cells}".rstrip())
    return lines
