"""Batched GPTQ beside gptqmodel's per-module loop on one MoE layer: same weights, same tokens, same settings.

    python -m specter_lab.compress.bench_gptq

The loop is gptqmodel's own `GPTQ` class on one nn.Linear after the other (damping 1 %, no reordering). `speedup`
compares what the two do differently, Hessians to codes; `speedup_with_hessians` adds the sums of x x^T, the same matrix
products on both sides (the loop makes them twice for gate and up), which outweigh all else with many tokens.
"""

from __future__ import annotations

import os

os.environ.update(GPTQMODEL_CPU_WORKERS="2", GPTQMODEL_DISABLE_PACK_EXT="1", TOKENIZERS_PARALLELISM="false")

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from specter_lab.compress import grid
from specter_lab.compress.gptq import DAMP, LayerInputs, expert_tokens, hessians, solve
from specter_lab.compress.grid import dequantize
from specter_lab.models.experts import ExpertBank

BITS = 4
REPEATS = 5  # of the batched side; the best counts


@dataclass(frozen=True)
class Comparison:
    """What the benchmark found; errors are sums of ||X (W - Q)^T||^2 over the experts' own tokens."""

    experts: int
    hidden: int
    width: int
    tokens: int
    loop_s: float  # Hessians to codes
    loop_hessians_s: float
    batched_s: float  # Hessians to codes
    batched_hessians_s: float
    speedup: float
    speedup_with_hessians: float
    gate_up_error_ratio: float  # batched / loop
    down_error_ratio: float  # batched / loop
    equal_codes: float  # share of codes that are the same


def synthetic_layer(experts: int, hidden: int, width: int, tokens: int, top_k: int) -> tuple[ExpertBank, LayerInputs]:
    """A random layer whose inputs are correlated, as real ones are, and whose experts get unequal shares."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    mixing = torch.eye(hidden) + normal(hidden, hidden) / hidden**0.5
    inputs = normal(tokens, hidden) @ mixing  # [T, H]
    scores = inputs @ normal(hidden, experts) / hidden**0.5 + normal(experts)  # [T, E]
    gate, up, down = (0.02 * normal(experts, *shape) for shape in ((width, hidden), (width, hidden), (hidden, width)))
    bank = ExpertBank(0, gate, up, down)
    return bank, LayerInputs(inputs, scores.topk(top_k).indices, silu)


class _Loop:
    """gptqmodel's GPTQ, one linear layer at a time, with a clock for each of its two parts."""

    def __init__(self) -> None:
        self.hessians_s = 0.0
        self.codes_s = 0.0

    def quantize(self, weights: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """weights [out, in], inputs [T, in] -> codes [out, in] as floats, effective weights [out, in]."""
        from gptqmodel.quantization import GPTQ, QuantizeConfig

        linear = nn.Linear(weights.shape[1], weights.shape[0], bias=False)
        linear.weight.data = weights.clone()
        group = grid.group_of(weights.shape[1])
        config = QuantizeConfig(
            bits=BITS, group_size=group, sym=True, desc_act=False, act_group_aware=False, damp_percent=DAMP,
            offload_to_disk=False,
        )  # fmt: skip
        start = time.perf_counter()
        task = GPTQ(linear, config)
        task.quantizer.configure(perchannel=True)
        task.add_batch(inputs.unsqueeze(0), inputs)
        middle = time.perf_counter()
        quantized, scales, *_ = task.quantize()
        self.hessians_s += middle - start
        self.codes_s += time.perf_counter() - middle
        return torch.round(quantized / scales.repeat_interleave(group, dim=1)), quantized

    def quantize_all(self, weights: Tensor, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """weights [E, out, in], inputs E x [T_e, in] -> codes and effective weights [E, out, in]."""
        results = [self.quantize(w, x) for w, x in zip(weights, inputs)]
        return torch.stack([codes for codes, _ in results]), torch.stack([quantized for _, quantized in results])


def _best_time(work: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _error(inputs: list[Tensor], weights: Tensor, quantized: Tensor) -> float:
    return sum((x @ (w - q).t()).square().sum().item() for x, w, q in zip(inputs, weights, quantized))


@torch.no_grad()
def compare(experts: int, hidden: int, width: int, tokens: int, top_k: int = 4) -> Comparison:
    """Run both on one synthetic layer; down gets, on both sides, what the loop's gate and up put out."""
    bank, inputs = synthetic_layer(experts, hidden, width, tokens, top_k)
    rows = [inputs.hidden[chosen] for chosen in expert_tokens(inputs.indices, experts)]  # E x [T_e, H]
    gate_up = torch.cat((bank.gate, bank.up), dim=1)  # [E, 2I, H]
    _Loop().quantize(bank.gate[0], rows[0])  # first-use work is not timed

    loop = _Loop()
    gate, up = loop.quantize_all(bank.gate, rows), loop.quantize_all(bank.up, rows)
    middles = [silu(x @ g.t()) * (x @ u.t()) for x, g, u in zip(rows, gate[1], up[1])]  # E x [T_e, I]
    loop_down = loop.quantize_all(bank.down, middles)
    loop_gate_up = [torch.cat(parts, dim=1) for parts in zip(gate, up)]

    wide, narrow = hessians(rows), hessians(middles)
    batched_hessians_s = _best_time(lambda: (hessians(rows), hessians(middles)))
    batched_s = _best_time(lambda: (solve(gate_up, wide, BITS), solve(bank.down, narrow, BITS)))
    coded, coded_down = solve(gate_up, wide, BITS), solve(bank.down, narrow, BITS)
    equal = torch.cat([(loop_gate_up[0] == coded.codes).flatten(), (loop_down[0] == coded_down.codes).flatten()])
    return Comparison(
        experts, hidden, width, tokens,
        loop_s=loop.codes_s, loop_hessians_s=loop.hessians_s,
        batched_s=batched_s, batched_hessians_s=batched_hessians_s,
        speedup=loop.codes_s / batched_s,
        speedup_with_hessians=(loop.codes_s + loop.hessians_s) / (batched_s + batched_hessians_s),
        gate_up_error_ratio=_error(rows, gate_up, dequantize(coded)) / _error(rows, gate_up, loop_gate_up[1]),
        down_error_ratio=_error(middles, bank.down, dequantize(coded_down)) / _error(middles, bank.down, loop_down[1]),
        equal_codes=equal.float().mean().item(),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096, help="each goes to four experts")
    parser.add_argument("--threads", type=int, default=1, help="on both sides")
    arguments = vars(parser.parse_args())
    torch.set_num_threads(arguments.pop("threads"))
    print(json.dumps(asdict(compare(**arguments)), indent=2))


if __name__ == "__main__":
    main()
