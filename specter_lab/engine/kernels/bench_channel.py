"""Times of the per-channel grouped GEMM beside the least the memory allows.

    python -m specter_lab.engine.kernels.bench_channel [--tokens 40 128 512] [--active 1 4 ...] [--tune [TILES ...]] [--json FILE]

A row is one fully-connected layer: T tokens spread evenly over the active experts. Cold: the calls of one graph go
through copies of the weights that are several times the L2. Warm: one copy, again and again; it fits the L2 or not.
Every call's routing is known, so its first weights are on their way while the call before ends, as between the two layers
of an expert; torch's product does not do that.
The floor is the active experts' bytes over the measured bandwidth of a copy. `--tune` tries other tiles beside the default:
those named, as 64x8/2+4 for 64 outputs, 8 tokens, 2 warps, 4 tiles ahead, or those of FEW and MANY.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specter_lab.engine.kernels.bench import LAYERS
from specter_lab.engine.kernels.channel_gemm import (
    BITS,
    HALF,
    KINDS,
    ChannelTiles,
    ChannelWeights,
    SortedTokens,
    linear,
    sort_tokens,
    tiles_for,
)
from specter_lab.engine.kernels.timing import copy_gb_s, replay_times_us

EXPERTS = 32
ACTIVE = (1, 4, 8, 16, 24, 32)
TOKENS = (40, 128, 512)
TORCH = "16 bit, torch grouped_mm"
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SHAPES = {"Elephants 1024 x 4096": (1024, 4096), "Elephants 4096 x 1024": (4096, 1024)} | {
    f"{name} {layer.hidden} x {layer.width}": (layer.hidden, layer.width) for name, layer in LAYERS.items()
}
_COLD_BYTES = 400 << 20  # calls of one graph read at least this much: several times any L2
_MOST_COPIES = 192
_REPEATS = 30


@dataclass(frozen=True)
class ChannelRow:
    """One timed layer."""

    shape: str
    inputs: int
    outputs: int
    dtype: str
    kernel: str
    tokens: int
    active: int
    cache: str  # cold or warm
    time_us: float  # median of the replays
    time_low_us: float  # 5th percentile
    time_high_us: float  # 95th
    floor_us: float
    read_mb: float
    copy_gb_s: float
    tiles: str = ""

    @property
    def share(self) -> float:
        """Of the copy's bandwidth that the weights alone are read with."""
        return self.floor_us / self.time_us


def random_weights(kind: str, inputs: int, outputs: int, dtype: torch.dtype, experts: int = EXPERTS) -> ChannelWeights:
    """Random bits of that kind on the GPU; 16-bit ones are numbers."""
    words = torch.empty(experts, outputs, inputs * BITS[kind] // 16, dtype=torch.int16, device="cuda")
    if kind == HALF:
        words.view(dtype).normal_(0, 0.02)
        return ChannelWeights(kind, words, None, inputs)
    words.random_(-(2**15), 2**15)
    scales = torch.rand(experts, 1, outputs, device="cuda").mul_(0.01).half()
    return ChannelWeights(kind, words, scales, inputs)


def spread(tokens: int, active: int, tile: int) -> SortedTokens:
    """Tokens dealt out to the active experts, which lie anywhere among all."""
    chosen = torch.randperm(EXPERTS, device="cuda")[:active]
    return sort_tokens(chosen[torch.arange(tokens, device="cuda") % active], EXPERTS, tile)


def calls_of(bank: list[ChannelWeights], x: Tensor, active: int, tiles: ChannelTiles | None = None) -> list:
    """One call per copy of the weights, each with a routing of its own."""
    out = torch.empty(len(x), bank[0].outputs, dtype=x.dtype, device="cuda")
    tiles = tiles or tiles_for(bank[0], len(x))
    return [
        partial(linear, x, weights, spread(len(x), active, tiles.tokens), out, gather=True, routed=True, tiles=tiles)
        for weights in bank
    ]


def torch_calls(bank: list[ChannelWeights], x: Tensor, active: int) -> list:
    """Torch's own grouped product (BF16 only), on tokens already sorted."""
    calls = []
    for weights in bank:
        routes = spread(len(x), active, len(x))
        ends = torch.bincount(
            torch.repeat_interleave(routes.expert.long(), routes.count.long()), minlength=EXPERTS
        ).cumsum(0)
        matrices = weights.words.view(x.dtype).transpose(1, 2)
        calls.append(partial(F.grouped_mm, x, matrices, offs=ends.to(torch.int32)))
    return calls


def rows_of(shape: str, dtype: str, copy: float, *, tokens: Iterable[int] = TOKENS, active: Iterable[int] = ACTIVE,
            caches: Iterable[str] = ("cold", "warm"), kernels: Iterable[str] = (*KINDS, TORCH),
            tunings: Iterable[ChannelTiles | None] = (None,)) -> Iterator[ChannelRow]:  # fmt: skip
    """Every kernel on one shape."""
    inputs, outputs = SHAPES[shape]
    for kind in kernels:
        if kind == TORCH and dtype != "bf16":
            continue
        stored = HALF if kind == TORCH else kind
        size = inputs * outputs * BITS[stored] // 8
        for count in active:
            copies = min(_MOST_COPIES, max(3, -(-_COLD_BYTES // (count * size)))) if "cold" in caches else 1
            copies = min(copies, max(3, (24 << 30) // (EXPERTS * size)))  # all experts lie in memory, used or not
            bank = [random_weights(stored, inputs, outputs, TYPES[dtype]) for _ in range(copies)]
            read = count * bank[0].expert_bytes
            for number in tokens:
                if number < count:
                    continue
                x = torch.randn(number, inputs, device="cuda").to(TYPES[dtype])
                for cache in caches:
                    part = bank if cache == "cold" else bank[:1] * 8
                    for tiles in tunings if kind != TORCH else (None,):
                        if tiles and (outputs % tiles.outputs or (tiles.shared and kind != HALF)):
                            continue
                        calls = torch_calls(part, x, count) if kind == TORCH else calls_of(part, x, count, tiles)
                        times = replay_times_us(calls, _REPEATS)
                        low, time, high = np.quantile(times, (0.05, 0.5, 0.95)).tolist()
                        shown = "" if tiles is None else name_of(tiles)
                        yield ChannelRow(shape, inputs, outputs, dtype, kind, number, count, cache, time, low, high,
                                         read / copy / 1e3, read / 1e6, copy, shown)  # fmt: skip
            del bank


def report(row: ChannelRow) -> str:
    """One line of the table."""
    return (f"{row.shape:<26} {row.dtype:<5} {row.kernel:<25} {row.tokens:>4} {row.active:>3} {row.cache:<5} {row.tiles:<11}"
            f"{row.read_mb:>9.2f} {row.floor_us:>9.2f} {row.time_us:>9.2f} {row.share:>6.1%}")  # fmt: skip


def name_of(tiles: ChannelTiles) -> str:
    """64x8/2+4: outputs x tokens / warps + tiles ahead; 128x64/4+3s: by way of shared memory."""
    return f"{tiles.outputs}x{tiles.tokens}/{tiles.warps}+{tiles.ahead}{'s' * tiles.shared}"


def tiles_named(name: str) -> ChannelTiles:
    """The other way round.

    Raises:
        ValueError: another form.
    """
    found = re.fullmatch(r"(\d+)x(\d+)/(\d+)\+(\d+)(s?)", name)
    if not found:
        raise ValueError(f"'{name}' is not of the form 64x8/2+4")
    *numbers, shared = found.groups()
    return ChannelTiles(*map(int, numbers), shared=bool(shared))


FEW = (  # candidates for few tokens an expert
    "32x8/2+2", "32x8/2+4", "64x8/2+2", "64x8/2+4", "64x8/4+2", "64x8/4+4", "64x16/2+4", "64x16/4+2", "128x8/2+2",
    "128x8/4+4", "256x8/4+2", "256x8/8+2",
)  # fmt: skip
MANY = (  # and for many
    "64x32/4+2", "64x64/4+1", "128x32/4+1", "128x32/8+1", "128x64/4+1", "128x64/8+1", "256x64/8+1",
    "128x64/4+4s", "128x128/4+3s", "128x128/8+3s", "256x64/8+4s", "256x128/8+3s",
)  # fmt: skip
_MANY_TOKENS = 16  # an expert


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtypes", nargs="*", default=list(TYPES), choices=list(TYPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--active", nargs="*", type=int, default=ACTIVE)
    parser.add_argument("--cold", action="store_true", help="no warm rows")
    parser.add_argument("--kernels", nargs="*", default=(*KINDS, TORCH), choices=(*KINDS, TORCH))
    parser.add_argument(
        "--tune", nargs="*", type=tiles_named, help="other tiles as well: these, or those of the module"
    )
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_gb_s()
    print(f"{torch.cuda.get_device_name()}: copy {copy:.0f} GB/s")
    print(
        f"{'shape':<26} {'type':<5} {'kernel':<25} {'T':>4} {'act':>3} {'L2':<5} {'tiles':<11}{'MB':>9} {'floor us':>9} {'us':>9} {'share':>6}"
    )
    caches = ("cold",) if arguments.cold else ("cold", "warm")
    rows = []
    for shape, dtype, tokens in product(arguments.shapes, arguments.dtypes, arguments.tokens):
        tunings = arguments.tune or ()
        if arguments.tune == []:
            tunings = map(tiles_named, MANY if tokens / EXPERTS >= _MANY_TOKENS else FEW)
        for row in rows_of(
            shape, dtype, copy, tokens=(tokens,), active=arguments.active, caches=caches, kernels=arguments.kernels,
            tunings=(None, *tunings),
        ):  # fmt: skip
            print(report(row), flush=True)
            rows.append(asdict(row))
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
