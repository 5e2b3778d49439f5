"""How fast the first CUDA GPU copies, multiplies and is told what to do."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from specter_lab.measure.host_speed import COPY_SIZES, Rate, low_s, operator_us

SMALL_READ_BYTES = 4096  # a result that the host waits for
H2D_SIZES = (*COPY_SIZES[1:], 268_435_456)
POOL_BYTES = 2 * H2D_SIZES[-1]  # a power of two, which PyTorch's allocator of pinned memory would round up to
MATMUL_SIZE = 8192


@dataclass(frozen=True)
class GpuSpeed:
    """The first GPU and its link to pinned host memory."""

    name: str
    link: str
    memory_gb: float
    copy_gb_s: float  # inside the device, bytes read and written
    bf16_tflop_s: float
    launch_us: float  # one kernel, launching or running, whichever is slower
    operator_us: float  # one eager operator of a decoder layer
    h2d: tuple[Rate, ...]
    d2h: tuple[Rate, ...]  # SMALL_READ_BYTES with synchronisation, the larger ones without


def measure_gpu(on_step: Callable[[str], None], *, budget_s: float = 0.4) -> GpuSpeed | None:
    """Measure the first GPU; None where PyTorch sees none.

    Args:
        on_step: told what is measured next.
        budget_s: time for each number.
    """
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    with torch.inference_mode():
        on_step("copies to and from the GPU")
        h2d, d2h, copy_gb_s = _copies(budget_s)
        on_step("the GPU's matrix products and launches")
        return GpuSpeed(
            name=properties.name, link=_link(), memory_gb=properties.total_memory / 1e9, copy_gb_s=copy_gb_s,
            bf16_tflop_s=_matmul_tflop_s(budget_s), launch_us=_launch_us(budget_s),
            operator_us=operator_us("cuda", budget_s), h2d=h2d, d2h=d2h,
        )  # fmt: skip


def _copies(budget_s: float) -> tuple[tuple[Rate, ...], tuple[Rate, ...], float]:
    host = torch.empty(POOL_BYTES, dtype=torch.uint8, pin_memory=True)
    device, other = (torch.zeros(POOL_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    h2d = tuple(_copy_rate(device, host, size, budget_s) for size in H2D_SIZES)
    d2h = tuple(_copy_rate(host, device, size, budget_s) for size in H2D_SIZES)
    inside_s = _event_s(lambda _: other.copy_(device), budget_s)
    return h2d, (_small_read_rate(host, device, budget_s), *d2h), 2 * POOL_BYTES / inside_s * 1e-9


def _matmul_tflop_s(budget_s: float) -> float:
    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * MATMUL_SIZE**3 / _event_s(lambda _: left @ right, budget_s) * 1e-12


def _copy_rate(to: torch.Tensor, source: torch.Tensor, size: int, budget_s: float) -> Rate:
    pairs = [(to[o : o + size], source[o : o + size]) for o in range(0, POOL_BYTES - size + 1, size)]

    def copy(i: int) -> None:
        pairs[i % len(pairs)][0].copy_(pairs[i % len(pairs)][1], non_blocking=True)

    return Rate(size, size / _event_s(copy, budget_s) * 1e-9)


def _small_read_rate(host: torch.Tensor, device: torch.Tensor, budget_s: float) -> Rate:
    torch.cuda.synchronize()
    seconds = low_s(lambda _: host[:SMALL_READ_BYTES].copy_(device[:SMALL_READ_BYTES]), budget_s)
    return Rate(SMALL_READ_BYTES, SMALL_READ_BYTES / seconds * 1e-9)


def _event_s(function: Callable[[int], object], budget_s: float) -> float:
    """Median time of one call on the GPU, one at a time, between two events; at least five after two warm-ups."""
    times_s: list[float] = []
    end = perf_counter() + budget_s
    while len(times_s) < 7 or perf_counter() < end:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        function(len(times_s))
        after.record()
        after.synchronize()
        times_s.append(before.elapsed_time(after) * 1e-3)
    return median(times_s[2:])


def _launch_us(budget_s: float) -> float:
    number = torch.zeros(1, device="cuda")

    def launches(_: int) -> None:
        for _ in range(200):
            number.add_(1)
        torch.cuda.synchronize()

    return low_s(launches, budget_s) / 200 * 1e6


def _link() -> str:
    """As the driver's command names it: "PCIe 5.0 x16"."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        generation, width = done.stdout.strip().split(", ")
        return f"PCIe {int(generation)}.0 x{int(width)}"
    except (OSError, ValueError, subprocess.SubprocessError):
        return "unknown link"
