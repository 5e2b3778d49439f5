"""Residual transport: bytes that cross the link, and on a GPU how fast experts are put together again.

python -m specter_lab.engine.kernels.bench_residual [MODEL ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from specter_lab.compress.int4 import quantize_bank
from specter_lab.compress.residual import size
from specter_lab.engine.records import new_records
from specter_lab.engine.transport import ALIGNED
from specter_lab.models.experts import ExpertBank, read_banks
from specter_lab.models.load import ZOO_MODELS, load

GAUSSIAN = "Gaussian"
HIDDEN, WIDTH = 2048, 1408  # Qwen1.5-MoE's
CALLS = 8  # of the kernel in one graph, each with its own room and slots


def weights_of(name: str) -> Iterator[Tensor]:
    """BF16 matrices [E, out, in]: a model's routed experts, or a random one."""
    banks = [gaussian("cpu")] if name == GAUSSIAN else read_banks(load(name).model)
    for bank in banks:
        yield from (part.bfloat16() for part in (bank.gate, bank.up, bank.down))


def gaussian(device: str) -> ExpertBank:
    """One expert, its weights BF16's."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((1, WIDTH, HIDDEN), (1, WIDTH, HIDDEN), (1, HIDDEN, WIDTH))
    parts = (torch.randn(size, generator=generator, device=device).mul(0.02).bfloat16().float() for size in sizes)
    return ExpertBank(0, *parts)


def size_row(name: str) -> str:
    """Bits per weight over the link, without the codes that are there already."""
    found = size(weights_of(name))
    return f"{name:14s} {found.bits:5.2f} bits of 16, {16 / found.bits:.2f}x the link; {found.exceptions / found.weights:.2%} exceptions"


def rate_row() -> str:
    """Output of the kernel on a GPU, beside the link and a copy within the GPU."""
    from specter_lab.engine.kernels.residual import EXPERTS, restore_experts
    from specter_lab.engine.kernels.timing import copy_gb_s, link_gb_s, replay_us

    bank = gaussian("cuda")
    host = torch.cat([part.flatten(1) for part in (bank.gate, bank.up, bank.down)], dim=1)[None].bfloat16().cpu()
    records = new_records(host, (quantize_bank(bank),))
    record = pad(records.of(0, 0).cuda(), (0, -int(records.length.max()) % ALIGNED))
    rooms = [record.repeat(EXPERTS, 1) for _ in range(CALLS)]
    slots = [torch.empty(EXPERTS, host.shape[2], dtype=torch.bfloat16, device="cuda") for _ in range(CALLS)]
    what = torch.tensor([(0, slot) for slot in range(EXPERTS)], dtype=torch.int32, device="cuda")
    calls = [partial(restore_experts, room, what, records, slot) for room, slot in zip(rooms, slots)]
    rate = slots[0].nbytes / replay_us(calls) / 1e3
    return f"restored at {rate:.0f} GB/s of BF16, {rate / link_gb_s():.1f}x the link ({link_gb_s():.0f} GB/s), {rate / copy_gb_s():.0%} of a copy"


if __name__ == "__main__":
    for model in sys.argv[1:] or (GAUSSIAN, *ZOO_MODELS[:3]):
        print(size_row(model), flush=True)
    print(rate_row() if torch.cuda.is_available() else "no GPU: the kernel's rate was not measured")
