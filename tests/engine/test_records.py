"""Experts beside their codes: every pattern comes back, from the reference and from the kernel."""

import os
import subprocess
import sys

import pytest
import torch

from specter_lab.compress.int4 import Int4Bank, Int4Weights, pack, quantize_bank, unpack
from specter_lab.compress.residual import MOVED, NEAREST
from specter_lab.engine.records import new_records, restored
from specter_lab.engine.transport import NO_SLOT
from specter_lab.models.experts import ExpertBank
from specter_lab.paths import ROOT


def rounded(experts: int, hidden: int, width: int) -> tuple[torch.Tensor, Int4Bank]:
    """Gaussian experts [1, E, N] and their codes."""
    generator = torch.Generator().manual_seed(hidden * width)
    parts = [torch.randn(experts, *size, generator=generator).mul(0.02).bfloat16().float()
             for size in ((width, hidden), (width, hidden), (hidden, width))]  # fmt: skip
    host = torch.cat([part.flatten(1) for part in parts], dim=1)[None]
    return host.bfloat16(), quantize_bank(ExpertBank(0, *parts))


def every_pattern(q: int) -> tuple[torch.Tensor, Int4Bank]:
    """One expert that holds all 65,536 patterns, NaN payloads and subnormal numbers included, all beside the code q."""
    hidden, width = 256, 128
    host = torch.arange(3 * hidden * width).to(torch.int16).view(torch.bfloat16).view(1, 1, -1)

    def codes(rows: int, inputs: int) -> Int4Weights:
        return Int4Weights(pack(torch.full((1, rows, inputs), q, dtype=torch.int8)), torch.full((1, rows, inputs // 128), 0.01).half())  # fmt: skip

    return host, Int4Bank(0, codes(width, hidden), codes(width, hidden), codes(hidden, width))


def compensated(experts: int, hidden: int, width: int) -> tuple[torch.Tensor, Int4Bank]:
    """Codes as GPTQ leaves them: a fifth is a step away from the nearest."""
    host, bank = rounded(experts, hidden, width)
    generator = torch.Generator().manual_seed(0)

    def moved(part: Int4Weights) -> Int4Weights:
        codes = unpack(part.packed)
        step = torch.randint(0, 10, codes.shape, generator=generator)
        return Int4Weights(pack((codes + (step == 0).char() - (step == 1).char()).clamp(-8, 7)), part.scales)

    return host, Int4Bank(0, *map(moved, (bank.gate, bank.up, bank.down)))


CASES = [lambda q=q: every_pattern(q) for q in (-8, -1, 0, 1, 7)] + [
    lambda s=s: rounded(*s) for s in ((1, 2, 2), (3, 64, 32), (2, 128, 384), (1, 384, 56))
] + [lambda: compensated(2, 256, 128)]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_reference_restores_every_bit(case):
    host, bank = case()
    records = new_records(host, (bank,))
    for expert in range(len(host[0])):
        assert torch.equal(restored(records, 0, expert).view(torch.int16), host[0, expert].view(torch.int16))
    assert records.length.sum() == records.nbytes and records.rows == 2 * records.width + records.hidden


def test_gaussian_experts_take_about_nine_bits():
    host, bank = rounded(2, 256, 128)
    records = new_records(host, (bank,))
    assert 8.7 < records.bits < 9.2 and records.reach == NEAREST
    assert records.exceptions.max() < 2e-3 * records.numel


def test_codes_that_were_moved_cost_exceptions_and_no_bit():
    host, bank = compensated(2, 256, 128)
    records = new_records(host, (bank,))
    assert 10 < records.bits < 13 and 0.02 < records.exceptions.sum() / (2 * records.numel) < 0.2
    assert records.reach == MOVED  # which lists fewer


def check_kernel(device: str) -> None:
    from specter_lab.engine.kernels.residual import EXPERTS, restore_experts

    for case in CASES:
        host, bank = case()
        parts = (
            Int4Weights(part.packed.to(device), part.scales.to(device)) for part in (bank.gate, bank.up, bank.down)
        )
        records, experts = new_records(host, (Int4Bank(0, *parts),)), len(host[0])
        slots = torch.full((experts + 1, host.shape[2]), float("nan"), dtype=torch.bfloat16, device=device)
        for first in range(0, experts, EXPERTS):
            room = torch.zeros(EXPERTS, -(-int(records.length.max()) // 16) * 16, dtype=torch.uint8, device=device)
            some = range(first, min(first + EXPERTS, experts))
            for place, expert in zip(room, some):
                place[: records.length[0, expert]] = records.of(0, expert)
            what = torch.full((EXPERTS, 2), NO_SLOT, dtype=torch.int32)
            what[: len(some)] = torch.tensor([(expert, experts - expert) for expert in some])  # from the last slot down
            restore_experts(room, what.to(device), records, slots)
        assert torch.equal(slots[1:].flip(0).cpu().view(torch.int16), host[0].view(torch.int16))


@pytest.mark.gpu
def test_the_kernel_restores_every_bit():
    check_kernel("cuda")


def test_the_kernel_in_tritons_interpreter():
    pytest.importorskip("triton")
    run = "from tests.engine.test_records import check_kernel; check_kernel('cpu')"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", run], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
