"""Named hardware profiles: the numbers of a machine that the cost model needs, each with its source.

    profile = read_profile("rtx4090")               # shipped: profiles/rtx4090.toml
    profile = read_profile("this-machine")          # measured here by `specter-lab doctor`
    profile.h2d.ms(17_301_504)                      # one copy of that size, host to device

A profile is a TOML file; to simulate another machine, copy one into the folder of your own profiles
(`own_profiles()`, artifacts/profiles) and change it. Sizes are bytes, GB are 10^9 bytes as in data sheets, and every
source says what kind of number it stands beside: one from a data sheet, measured, scaled (from another machine's
measurement) or assumed.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from specter_lab import paths
from specter_lab.errors import UserError

PROFILES = Path(__file__).parent / "profiles"
PAPERS_GPU = "a100-40gb-pcie4"  # Specter, section Setting
THIS_MACHINE = "this-machine"
KINDS = ("data sheet", "measured", "scaled", "assumed")  # how the source of a number begins

NUMBERS = ("memory_gb", "memory_bandwidth_gb_s", "bf16_tflop_s", "launch_us")
CPU_NUMBERS = ("memory_gb", "memory_bandwidth_gb_s", "bf16_tflop_s", "fp32_tflop_s")
CURVES = ("h2d", "d2h", "disk_read")


@dataclass(frozen=True)
class Curve:
    """Bandwidth of one transfer at a time, by its size."""

    sizes_bytes: tuple[int, ...]  # ascending
    gb_s: tuple[float, ...]  # at those sizes

    @cached_property
    def times_ms(self) -> tuple[float, ...]:
        return tuple(size / gb_s * 1e-6 for size, gb_s in zip(self.sizes_bytes, self.gb_s))

    def ms(self, num_bytes: float) -> float:
        """Time of one transfer; between the points linear in time, beyond the largest at its bandwidth, and never below
        the time of the smallest."""
        sizes, times_ms = self.sizes_bytes, self.times_ms
        if num_bytes >= sizes[-1]:
            return num_bytes / self.gb_s[-1] * 1e-6
        right = bisect_right(sizes, num_bytes)
        if right == 0:
            return times_ms[0]
        share = (num_bytes - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return times_ms[right - 1] + share * (times_ms[right] - times_ms[right - 1])


@dataclass(frozen=True)
class Cpu:
    """The host's cores, all of them together."""

    name: str
    cores: int
    memory_gb: float  # the host's; the same as the GPU's where they share one
    memory_bandwidth_gb_s: float  # reading
    bf16_tflop_s: float
    fp32_tflop_s: float


@dataclass(frozen=True)
class Profile:
    """One GPU, its host, and what lies between them.

    `measured` corrects the roofline: (operation, model, tokens) -> ms; `plan.cost` says which operations it asks for.
    """

    name: str
    gpu: str
    link: str
    memory_gb: float
    memory_bandwidth_gb_s: float
    bf16_tflop_s: float  # dense
    launch_us: float  # host time per operator
    h2d: Curve
    d2h: Curve
    disk_read: Curve
    cpu: Cpu
    sources: Mapping[str, str]  # "memory_gb", "cpu.bf16_tflop_s", "h2d at 262144 bytes", ... -> where it comes from
    measured: Mapping[tuple[str, str, int], float] = field(default_factory=dict)
    unified_memory: bool = False  # GPU and host share one memory

    def host_bytes_beside(self, gpu_bytes: int) -> float:
        """Host memory, less `gpu_bytes` where the GPU's lie in it too."""
        return self.cpu.memory_gb * 1e9 - (gpu_bytes if self.unified_memory else 0)

    def h2d_ms(self, num_bytes: float) -> float:
        """Time of one host-to-device copy of pinned memory."""
        return self.h2d.ms(num_bytes)


def own_profiles() -> Path:
    """The folder of the user's profiles, this machine's among them."""
    return paths.OUT / "profiles"


def profile_names() -> list[str]:
    """Every profile there is: the shipped ones and the user's own."""
    return sorted({file.stem for folder in (PROFILES, own_profiles()) for file in folder.glob("*.toml")})


def read_profile(name: str = PAPERS_GPU) -> Profile:
    """The profile `name`: the user's own file if there is one, else the shipped one.

    Raises:
        UserError: there is no such profile, or its file lacks a number or a curve.
    """
    for folder in (own_profiles(), PROFILES):
        path = folder / f"{name}.toml"
        if path.exists():
            return _read(path, path.stat().st_mtime_ns)
    if name == THIS_MACHINE:
        raise UserError("this machine has not been measured yet: run `specter-lab doctor` (under a minute)")
    known = ", ".join(profile_names())
    raise UserError(f"no hardware profile '{name}': choose from {known}, or write {name}.toml into {own_profiles()}")


def write_profile(profile: Profile, path: Path) -> None:
    """Write `profile` so that it reads back equal; an older file is replaced in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text("\n".join(_toml_lines(profile)) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


@cache
def _read(path: Path, _mtime_ns: int) -> Profile:
    try:
        text = path.read_text(encoding="utf-8")
        fields = _Fields(path.name, tomllib.loads(text))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"hardware profile {path.name} is not TOML ({error}): correct it, or write it anew") from error
    sources: dict[str, str] = {}
    curves = {name: fields.curve(name, sources) for name in CURVES}
    return Profile(
        name=path.stem, gpu=fields.text("gpu"), link=fields.text("link"), **curves,
        **{name: fields.number(name, sources) for name in NUMBERS},
        cpu=Cpu(fields.text("cpu.name"), fields.whole(fields.get("cpu.cores"), "cpu.cores"),
                **{name: fields.number(f"cpu.{name}", sources) for name in CPU_NUMBERS}),
        sources=sources, measured=fields.measured(), unified_memory=fields.flag("unified_memory"),
    )  # fmt: skip


@dataclass(frozen=True)
class _Fields:
    """The contents of a profile's file, and the sentence for what it lacks."""

    file: str
    tables: dict

    def get(self, name: str):
        """The value at a dotted name."""
        value = self.tables
        for key in name.split("."):
            if not isinstance(value, dict) or key not in value:
                raise self.lacks(name)
            value = value[key]
        return value

    def number(self, name: str, sources: dict[str, str]) -> float:
        sources[name] = self.text(f"{name}.source")
        return self.positive(self.get(f"{name}.value"), name)

    def text(self, name: str) -> str:
        return self.written(self.get(name), name)

    def flag(self, name: str) -> bool:
        """False where it is not there."""
        if not isinstance(value := self.tables.get(name, False), bool):
            raise self.wrong(value, name, "true or false")
        return value

    def rows(self, name: str, *keys: str) -> list[dict]:
        """The tables `[[name]]`, all of which have these keys."""
        rows = self.get(name)
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            raise self.lacks(name)
        for row in rows:
            for key in keys:
                if key not in row:
                    raise self.lacks(f"{name}.{key}")
        return rows

    def curve(self, name: str, sources: dict[str, str]) -> Curve:
        points = {}
        for row in self.rows(name, "bytes", "gb_s", "source"):
            size = self.whole(row["bytes"], f"{name}.bytes")
            if size in points:
                raise UserError(
                    f"hardware profile {self.file} has two points of '{name}' at one size: keep one of them"
                )
            points[size] = self.positive(row["gb_s"], f"{name}.gb_s")
            sources[f"{name} at {size} bytes"] = self.written(row["source"], f"{name}.source")
        return Curve(*zip(*sorted(points.items())))

    def measured(self) -> dict[tuple[str, str, int], float]:
        rows = self.rows("measured", "operation", "model", "tokens", "ms") if "measured" in self.tables else []
        return {
            (self.written(row["operation"], "measured.operation"), self.written(row["model"], "measured.model"),
             self.whole(row["tokens"], "measured.tokens")): self.positive(row["ms"], "measured.ms")
            for row in rows
        }  # fmt: skip

    def positive(self, value, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.wrong(value, name, "a number above zero")
        return value

    def whole(self, value, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(value, name, "a whole number above zero")
        return value

    def written(self, value, name: str) -> str:
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(value, name, "a text that says what it is")
        return value

    def wrong(self, value, name: str, wanted: str) -> UserError:
        return UserError(f"hardware profile {self.file}: '{name}' is {value!r}, give it {wanted}")

    def lacks(self, name: str) -> UserError:
        mine = self.file == f"{THIS_MACHINE}.toml"
        way_out = "run `specter-lab doctor` again" if mine else f"{PAPERS_GPU}.toml shows all fields"
        return UserError(f"hardware profile {self.file} lacks '{name}': {way_out}")


def _toml_lines(profile: Profile) -> Iterator[str]:
    def text(value: str) -> str:
        return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML string

    def number(name: str, value: float) -> Iterator[str]:
        yield from ("", f"[{name}]", f"value = {value!r}", f"source = {text(profile.sources[name])}")

    yield f"gpu = {text(profile.gpu)}"
    yield f"link = {text(profile.link)}"
    if profile.unified_memory:
        yield "unified_memory = true"
    for name in NUMBERS:
        yield from number(name, getattr(profile, name))
    yield from ("", "[cpu]", f"name = {text(profile.cpu.name)}", f"cores = {profile.cpu.cores}")
    for name in CPU_NUMBERS:
        yield from number(f"cpu.{name}", getattr(profile.cpu, name))
    for name in CURVES:
        curve = getattr(profile, name)
        for size, gb_s in zip(curve.sizes_bytes, curve.gb_s):
            source = profile.sources[f"{name} at {size} bytes"]
            yield from ("", f"[[{name}]]", f"bytes = {size}", f"gb_s = {gb_s!r}", f"source = {text(source)}")
    for (operation, model, tokens), ms in profile.measured.items():
        yield from ("", "[[measured]]", f"operation = {text(operation)}", f"model = {text(model)}")
        yield from (f"tokens = {tokens}", f"ms = {ms!r}")
