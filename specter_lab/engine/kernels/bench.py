"""Times of the kernels at full size, beside the least the memory allows.

    python -m specter_lab.engine.kernels.bench [--models NAME ...] [--json FILE]

A row is one MoE layer (or one dense layer), weights cold in L2. Its floor is the bytes of the experts in use over the
measured bandwidth: device bytes over that of a copy, host bytes over that of the copy engine, whichever is longer.
Weights are random, and routing is uniform, which needs more experts than a trained router's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from specter_lab.engine.kernels import dense, grouped_gemm, int4_experts
from specter_lab.engine.kernels.timing import copy_gb_s, link_gb_s, replay_us

_COLD_BYTES = 400 << 20  # calls of one graph read at least this much: several times any L2
_MOST_LAYERS = 16
_BF16_LAYERS = 4
_DRAFT_TOKENS = (1, 8, 32)
_VERIFY_TOKENS = (9, 17)


@dataclass(frozen=True)
class Layer:
    """Shape of one MoE layer."""

    experts: int
    top_k: int
    hidden: int
    width: int

    @property
    def bf16_bytes(self) -> int:
        """One expert in BF16."""
        return 3 * self.hidden * self.width * 2

    @property
    def int4_bytes(self) -> int:
        """One expert in the INT4 layout: half a byte a weight and two bytes a group."""
        return 3 * self.hidden * self.width * (64 + 2) // 128


LAYERS = {
    "Qwen1.5-MoE": Layer(60, 4, 2048, 1408),
    "DeepSeek-V2-Lite": Layer(64, 6, 2048, 1408),
    "Phi-3.5-MoE": Layer(16, 2, 4096, 6400),
}
DENSE = {  # [outputs, inputs] of Qwen1.5-MoE
    "attention in": (6144, 2048), "attention out": (2048, 2048), "router": (60, 2048),
    "shared gate, up": (11264, 2048), "shared down": (2048, 5632), "head": (151936, 2048),
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    device: str
    copy_gb_s: float
    link_gb_s: float


@dataclass(frozen=True)
class Row:
    model: str
    what: str
    tokens: int
    experts: float  # in use, mean over layers
    device_bytes: int
    host_bytes: int
    time_us: float
    floor_us: float
    host_gb_s: float | None  # bytes read over PCIe per time

    @property
    def ratio(self) -> float:
        return self.time_us / self.floor_us


def row(
    machine: Machine, model: str, what: str, tokens: int, experts: float, device_bytes: float, host_bytes: float,
    calls: list[Callable[[], object]],
) -> Row:  # fmt: skip
    """Time `calls`, each of which reads the given bytes."""
    time_us = replay_us(calls, repeats=10 if host_bytes else 30)
    floor_us = max(device_bytes / machine.copy_gb_s, host_bytes / machine.link_gb_s) / 1e3
    host_gb_s = host_bytes / time_us / 1e3 if host_bytes else None
    return Row(model, what, tokens, experts, round(device_bytes), round(host_bytes), time_us, floor_us, host_gb_s)


def routing(layer: Layer, tokens: int) -> tuple[Tensor, Tensor]:
    """Uniform routing: indices and weights [T, k]."""
    indices = torch.rand(tokens, layer.experts, device="cuda").topk(layer.top_k).indices.contiguous()
    return indices, torch.rand(tokens, layer.top_k, device="cuda")


def int4_bank(layer: Layer) -> SimpleNamespace:
    """A random layer in the INT4 layout."""

    def projection(outputs: int, inputs: int) -> SimpleNamespace:
        packed = torch.empty(layer.experts, outputs, inputs // 2, dtype=torch.uint8, device="cuda").random_()
        scales = torch.rand(layer.experts, outputs, inputs // 128, device="cuda").mul_(0.01).half()
        return SimpleNamespace(packed=packed, scales=scales)

    gate, up = projection(layer.width, layer.hidden), projection(layer.width, layer.hidden)
    return SimpleNamespace(gate=gate, up=up, down=projection(layer.hidden, layer.width))


def bf16_slab(layer: Layer) -> Tensor:
    """[E, 3 I H] random experts, each gate and up, then down."""
    size = (layer.experts, 3 * layer.hidden * layer.width)
    return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)


def addresses(slab: Tensor) -> Tensor:
    """[E] address of every row of a device or pinned tensor."""
    step = slab.stride(0) * slab.element_size()
    return torch.tensor([slab.data_ptr() + step * e for e in range(slab.shape[0])], device="cuda")


def span(slab: Tensor) -> tuple[int, int]:
    return slab.data_ptr(), slab.data_ptr() + slab.numel() * slab.element_size()


def draft_rows(machine: Machine, model: str, layer: Layer) -> Iterator[Row]:
    """INT4, fused and expert by expert."""
    count = min(_MOST_LAYERS, max(4, _COLD_BYTES // (layer.top_k * layer.int4_bytes)))
    banks = [int4_bank(layer) for _ in range(count)]
    for tokens in _DRAFT_TOKENS:
        x = torch.randn(tokens, layer.hidden, device="cuda").bfloat16()
        routes = [routing(layer, tokens) for _ in banks]
        experts = sum(i.unique().numel() for i, _ in routes) / count
        for what, one_by_one in (("INT4 fused", False), ("INT4 expert by expert", True)):
            if one_by_one and tokens > 1:
                continue
            calls = [
                partial(int4_experts.expert_ffn, x, *route, bank, one_by_one=one_by_one)
                for bank, route in zip(banks, routes)
            ]
            yield row(machine, model, what, tokens, experts, experts * layer.int4_bytes, 0, calls)


def torch_experts(x: Tensor, weights: Tensor, blocks: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One token's experts by torch, one after the other; the host knows which."""
    out = torch.zeros_like(x)
    for choice, (gate_up, down) in enumerate(blocks):
        gate, up = torch_linear(x, gate_up).chunk(2, dim=-1)
        out += torch_linear(silu(gate) * up, down) * weights[:, choice : choice + 1].to(x.dtype)
    return out


def verify_rows(machine: Machine, model: str, layer: Layer) -> Iterator[Row]:
    """BF16 through the address table: one token, then windows with all, half and none of the experts resident."""
    slabs = [bf16_slab(layer) for _ in range(_BF16_LAYERS)]
    cut = 2 * layer.hidden * layer.width
    x = torch.randn(1, layer.hidden, device="cuda").bfloat16()
    routes = [routing(layer, 1) for _ in slabs]
    tables = [addresses(slab) for slab in slabs]
    used = layer.top_k * layer.bf16_bytes
    calls = [
        partial(grouped_gemm.expert_ffn, x, *route, table, layer.width) for route, table in zip(routes, tables)
    ]  # fmt: skip
    yield row(machine, model, "BF16 grouped", 1, layer.top_k, used, 0, calls)
    blocks = [
        [(slab[e, :cut].view(-1, layer.hidden), slab[e, cut:].view(-1, layer.width)) for e in indices[0].tolist()]
        for slab, (indices, _) in zip(slabs, routes)
    ]
    calls = [partial(torch_experts, x, weights, block) for (_, weights), block in zip(routes, blocks)]
    yield row(machine, model, "BF16 torch, expert by expert", 1, layer.top_k, used, 0, calls)
    host = torch.empty(slabs[0].shape, dtype=torch.bfloat16, pin_memory=True).copy_(slabs[0])
    for tokens in _VERIFY_TOKENS:
        x = torch.randn(tokens, layer.hidden, device="cuda").bfloat16()
        routes = [routing(layer, tokens) for _ in slabs]
        experts = [i.unique().numel() for i, _ in routes]
        calls = [
            partial(grouped_gemm.expert_ffn, x, *route, table, layer.width) for route, table in zip(routes, tables)
        ]  # fmt: skip
        mean = sum(experts) / len(experts)
        yield row(machine, model, "BF16 resident", tokens, mean, mean * layer.bf16_bytes, 0, calls)
        chosen = routes[0][0].unique()
        for what, away in (("BF16 half resident", chosen[::2]), ("BF16 none resident", chosen)):
            table = tables[0].clone()
            table[away] = addresses(host)[away]
            far, near = (n * layer.bf16_bytes for n in (len(away), experts[0] - len(away)))
            call = partial(grouped_gemm.expert_ffn, x, *routes[0], table, layer.width, slab=span(slabs[0]))
            yield row(machine, model, what, tokens, experts[0], near, far, [call])


def dense_rows(machine: Machine) -> Iterator[Row]:
    """The row-invariant dense layer beside torch's."""
    arrivals = dense.new_arrivals("cuda")
    for name, shape in DENSE.items():
        size = 2 * shape[0] * shape[1]
        weights = [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
                   for _ in range(min(64, max(2, _COLD_BYTES // size)))]  # fmt: skip
        for tokens in (1, 9):
            x = torch.randn(tokens, shape[1], device="cuda").bfloat16()
            for what, call in (("row-invariant", partial(dense.linear, arrivals=arrivals)), ("torch", torch_linear)):
                calls = [partial(call, x, weight) for weight in weights]
                yield row(machine, f"dense, {name}", what, tokens, 0, size, 0, calls)


def this_machine() -> Machine:
    """Its ceilings, measured."""
    return Machine(torch.cuda.get_device_name(), copy_gb_s(), link_gb_s())


def report(found: Row) -> str:
    """One line of the table."""
    host = "" if found.host_gb_s is None else f"  {found.host_gb_s:5.1f} GB/s over PCIe"
    return (f"{found.model:<23} {found.what:<29} {found.tokens:>3} {found.experts:>6.1f} "
            f"{(found.device_bytes + found.host_bytes) / 1e6:>9.2f} {found.floor_us:>9.2f} {found.time_us:>9.2f} "
            f"{found.ratio:>6.2f}{host}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    machine = this_machine()
    print(f"{machine.device}: copy {machine.copy_gb_s:.0f} GB/s, PCIe {machine.link_gb_s:.1f} GB/s")
    print(f"{'layer':<23} {'kernel':<29} {'T':>3} {'exp.':>6} {'MB':>9} {'floor us':>9} {'us':>9} {'ratio':>6}")
    rows = []
    parts = [part(machine, name, LAYERS[name]) for name in arguments.models for part in (draft_rows, verify_rows)]
    for part in (*parts, dense_rows(machine)):
        for found in part:
            print(report(found), flush=True)
            rows.append(asdict(found))
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": asdict(machine), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
