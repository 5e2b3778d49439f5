"""Residual transport: bytes that cross the link, and on a GPU how fast weights are put together again.

python -m specter_lab.engine.kernels.bench_residual [MODEL ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from specter_lab.compress.grid import round_to_nearest
from specter_lab.compress.int4 import pack
from specter_lab.compress.residual import encode, size
from specter_lab.models.experts import read_banks
from specter_lab.models.load import ZOO_MODELS, load

GAUSSIAN = "Gaussian"
ROWS, WIDTH = 8448, 2048  # as many weights as three of Qwen1.5-MoE's experts


def weights_of(name: str) -> Iterator[Tensor]:
    """BF16 matrices [E, out, in]: a model's routed experts, or random ones."""
    if name == GAUSSIAN:
        yield (torch.randn(1, ROWS, WIDTH, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
        return
    for bank in read_banks(load(name).model):
        yield from (part.bfloat16() for part in (bank.gate, bank.up, bank.down))


def size_row(name: str) -> str:
    """Bits per weight over the link, without the codes that are there already."""
    found = size(weights_of(name))
    return f"{name:14s} {found.bits:5.2f} bits of 16, {16 / found.bits:.2f}x the link; {found.exceptions / found.weights:.2%} exceptions"


def rate_row() -> str:
    """Output of the kernel on a GPU, beside the link and a copy within the GPU."""
    from specter_lab.engine.kernels.residual import restore
    from specter_lab.engine.kernels.timing import copy_gb_s, link_gb_s, stream_us

    (weights,) = weights_of(GAUSSIAN)
    codes = round_to_nearest(weights, 4)
    residual = encode(weights, codes)
    moved = {name: getattr(residual, name).cuda() for name in ("low", "stream", "starts", "places", "patterns")}
    packed, scales = pack(codes.codes)[0].cuda(), codes.scales[0].cuda()
    there = replace(residual, **moved)
    rate = weights.nbytes / stream_us(lambda: restore(there, packed, scales)) / 1e3
    return f"restored at {rate:.0f} GB/s of BF16, {rate / link_gb_s():.1f}x the link ({link_gb_s():.0f} GB/s), {rate / copy_gb_s():.0%} of a copy"


if __name__ == "__main__":
    for model in sys.argv[1:] or (GAUSSIAN, *ZOO_MODELS[:3]):
        print(size_row(model), flush=True)
    print(rate_row() if torch.cuda.is_available() else "no GPU: the kernel's rate was not measured")
