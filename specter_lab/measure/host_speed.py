"""How fast this machine's processor copies, reads, multiplies and launches operators.

Other work on the machine makes calls slower, never faster, and two threads that wait for each other slower than one. So a number
is the first decile of many calls, not their median, on one thread or on every usable core, whichever is faster.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

EXPERT_BYTES = 17_301_504  # one BF16 expert of Qwen1.5-MoE or DeepSeek-V2-Lite
COPY_SIZES = (65_536, 262_144, 1_048_576, 4_194_304, EXPERT_BYTES, 134_217_728)
MATMUL_SIZES = (512, 1024, 2048, 4096)
LONG_CALL_S = 0.15  # a matrix product that takes this long is large enough
LOADED = 0.5  # of the cores: a machine with more work than that is busy


@dataclass(frozen=True)
class Rate:
    """Bandwidth of one transfer at a time."""

    num_bytes: int
    gb_s: float


@dataclass(frozen=True)
class HostSpeed:
    """One core or all usable ones together, whichever is faster."""

    copy: tuple[Rate, ...]  # bytes copied over time, from memory to memory
    read_gb_s: float
    fp32_tflop_s: float
    bf16_tflop_s: float
    operator_us: float  # one eager PyTorch operator on a few numbers


def measure_host(on_step: Callable[[str], None], *, budget_s: float = 0.4, pool_bytes: int = 2**29) -> HostSpeed:
    """Measure the cores of this process, whatever OMP_NUM_THREADS says.

    Args:
        on_step: told what is measured next.
        budget_s: time for each number and thread count (a little more when one repetition is slow).
        pool_bytes: memory that copies and reads go through; larger than every cache.
    """
    with torch.inference_mode():
        on_step("memory copies")
        copy = copy_rates(tuple(size for size in COPY_SIZES if 2 * size <= pool_bytes), budget_s, pool_bytes)
        on_step("memory reads")
        read_gb_s = host_read_gb_s(budget_s, pool_bytes)
        on_step("matrix products, FP32 and BF16")
        fp32, bf16 = (matmul_tflop_s(dtype, budget_s) for dtype in (torch.float32, torch.bfloat16))
        on_step("operator launches")
        return HostSpeed(copy, read_gb_s, fp32, bf16, operator_us("cpu", budget_s))


def copy_rates(sizes: Sequence[int], budget_s: float, pool_bytes: int) -> tuple[Rate, ...]:
    """Bandwidth of a copy of each size; sources and destinations move through the pool, so no cache holds them."""
    source, destination = (torch.full((pool_bytes,), fill, dtype=torch.uint8) for fill in (1, 2))
    rates = []
    for size in sizes:
        pairs = [(destination[o : o + size], source[o : o + size]) for o in range(0, pool_bytes - size + 1, size)]
        seconds = fastest_s(lambda i: pairs[i % len(pairs)][0].copy_(pairs[i % len(pairs)][1]), budget_s)
        rates.append(Rate(size, size / seconds * 1e-9))
    return tuple(rates)


def host_read_gb_s(budget_s: float, pool_bytes: int) -> float:
    """Bandwidth of a matrix-vector product: the way in which one token reads weights."""
    width = 4096
    matrix, vector = torch.ones(pool_bytes // (4 * width), width), torch.ones(width)  # [rows, width], FP32
    return matrix.nbytes / fastest_s(lambda _: torch.mv(matrix, vector), budget_s) * 1e-9


def matmul_tflop_s(dtype: torch.dtype, budget_s: float) -> float:
    """The best rate over sizes that grow until one product takes LONG_CALL_S."""
    best = 0.0
    for size in MATMUL_SIZES:
        left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        seconds = fastest_s(lambda _: left @ right, budget_s / 2)
        best = max(best, 2 * size**3 / seconds * 1e-12)
        if seconds > LONG_CALL_S:
            break
    return best


def operator_us(device: str, budget_s: float) -> float:
    """Time of one operator of an eager decoder layer on few numbers: what launching costs, work aside.

    On a GPU the queue is emptied at the end, so it is the slower of launching and running.
    """
    states, weight = torch.ones(1, 64, device=device), torch.ones(64, 64, device=device)
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None

    def layers(_: int) -> None:
        x = states
        for _ in range(20):  # 7 operators each
            normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
            x = functional.linear(normed, weight).softmax(-1) + states
        wait()

    return low_s(layers, budget_s) / (20 * 7) * 1e6


def fastest_s(function: Callable[[int], object], budget_s: float) -> float:
    """`low_s` on one thread and on all usable cores, the better of the two."""
    before, times_s = torch.get_num_threads(), []
    try:
        for threads in sorted({1, usable_cores()}):
            torch.set_num_threads(threads)
            times_s.append(low_s(function, budget_s))
    finally:
        torch.set_num_threads(before)
    return min(times_s)


def low_s(function: Callable[[int], object], budget_s: float) -> float:
    """First decile of one call's time; called with 0, 1, 2, ... at least three times after a warm-up."""
    function(0)
    times_s: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times_s) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        function(len(times_s) + 1)
        times_s.append(time.perf_counter() - start)
    return sorted(times_s)[len(times_s) // 10]


@dataclass(frozen=True)
class Load:
    """What the whole machine had to do before it was measured."""

    average: float  # threads that ran or wanted to, over the last minute
    cores: int

    @property
    def busy(self) -> bool:
        return self.average > LOADED * self.cores


def load() -> Load:
    """Ask before measuring: that is work, too."""
    return Load(os.getloadavg()[0], os.cpu_count() or 1)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    """The processor as the kernel names it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
