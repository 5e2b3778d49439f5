"""What a decoder step of the translator is made of beside experts, in the paper's geometry: times beside the bytes' floor.

    python -m specter_lab.engine.bench_switch_ops [--batches 1 96 ...] [--beam 1] [--tokens 32] [--json FILE]

Every call reads another layer's caches and weights, as in a step; what fits the L2 together stays there. The floor is the
bytes read and written over the measured bandwidth of a copy, and no kernel takes less than a launch in a graph.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specter_lab.engine import switch_ops
from specter_lab.engine.kernels.channel_gemm import sort_tokens
from specter_lab.engine.kernels.timing import copy_gb_s, replay_us
from specter_lab.engine.switch_model import HEAD_DIM
from specter_lab.models.switch import ELEPHANTS, SwitchGeometry

_SORT_TILE = 16


@dataclass(frozen=True)
class OpRow:
    """One timed operation."""

    what: str
    batch: int
    beam: int
    tokens: int  # of the source, and the last position of the target
    time_us: float
    floor_us: float


def operations(batch: int, beam: int, tokens: int, geometry: SwitchGeometry = ELEPHANTS, *, device: str = "cuda",
               dtype: torch.dtype = torch.float16) -> Iterator[tuple[str, list[Callable[[], object]], int]]:  # fmt: skip
    """Name, one call per layer, and bytes of a call."""
    hidden, layers, rows = geometry.hidden, range(geometry.decoder_layers), batch * beam
    heads = hidden // HEAD_DIM

    def random(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=kind)

    x, weight = random(rows, hidden), random(hidden)
    yield "norm", [partial(switch_ops.rms_norm, x, weight, 1e-6) for _ in layers], 2 * x.nbytes
    qkv, bias = random(rows, 3 * hidden), random(heads, tokens, tokens)
    owner = torch.arange(beam, device=device)[:, None].repeat(batch, 1, tokens)
    position = torch.tensor([tokens - 1], device=device)
    past = [random(2, batch, heads, beam, tokens, HEAD_DIM) for _ in layers]
    yield (
        "self-attention",
        [partial(switch_ops.self_attend, qkv, cache, owner, bias, position) for cache in past],
        past[0].nbytes,
    )
    mask = torch.zeros(batch, 1, 1, tokens, device=device, dtype=dtype)
    sources = [random(2, batch, heads, tokens, HEAD_DIM) for _ in layers]
    yield "cross-attention", [partial(switch_ops.cross_attend, x, cache, mask) for cache in sources], sources[0].nbytes
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    routers = [random(geometry.experts, hidden, kind=torch.float32) for _ in layers]
    yield "router", [partial(switch_ops.route, router, x, finished) for router in routers], x.nbytes + routers[0].nbytes
    chosen = torch.randint(geometry.experts, (rows,), device=device)
    yield "sorting", [partial(sort_tokens, chosen, geometry.experts, _SORT_TILE) for _ in layers], 2 * chosen.nbytes
    logits = random(rows, geometry.vocab)
    yield "likeliest token", [partial(switch_ops.likeliest, logits) for _ in layers], logits.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", nargs="*", type=int, default=(1, 20, 96))
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    copy, rows = copy_gb_s(), []
    print(f"{torch.cuda.get_device_name()}: copy {copy:.0f} GB/s")
    for batch in arguments.batches:
        for what, calls, read in operations(batch, arguments.beam, arguments.tokens):
            row = OpRow(what, batch, arguments.beam, arguments.tokens, replay_us(calls), read / copy / 1e3)
            print(f"{row.what:<16} batch {batch:>3}: {row.time_us:>7.2f} us, floor {row.floor_us:>6.2f} us", flush=True)
            rows.append(asdict(row))
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
