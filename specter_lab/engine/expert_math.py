"""Computing routed experts: by kernels that read through the address table, or row by row on a CPU.

Both add a token's experts in the order of its choices and round at the same places, whatever else is in the pass and wherever
the weights lie: offloaded equals resident bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from specter_lab.compress import grid
from specter_lab.compress.int4 import Int4Bank, unpack_bank
from specter_lab.engine.experts import ExpertMemory

NOT_NOW = -1  # an index that no kernel computes


@dataclass(frozen=True)
class TargetExperts:
    """The target's BF16 experts, read wherever the table says; needs no host."""

    memory: ExpertMemory

    def __call__(self, layer: int, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], indices [T, k], weights [T, k] -> [T, H]."""
        if x.is_cuda:
            from specter_lab.engine.kernels import grouped_gemm

            slab = self.memory.device.data_ptr()
            return grouped_gemm.expert_ffn(
                x, indices, weights, self.memory.table[layer], self.memory.shape.expert_width,
                slab=(slab, slab + self.memory.device.nbytes),
            )  # fmt: skip
        return combine(self.parts(layer, x, indices, weights), x.dtype)

    def parts(self, layer: int, x: Tensor, indices: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """Weighted outputs of every choice [T, k, H] float32; those of NOT_NOW are left as they are in `out`."""
        return pair_outputs(x, indices, weights, lambda e: self.memory.pieces(self.memory.block(layer, e)), out)


@dataclass(frozen=True)
class DraftExperts:
    """The draft's INT4 experts, all of them resident."""

    banks: tuple[Int4Bank, ...]  # per MoE layer, on the device

    @property
    def nbytes(self) -> int:
        return sum(part.packed.nbytes + part.scales.nbytes for b in self.banks for part in (b.gate, b.up, b.down))

    def __call__(self, layer: int, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        bank = self.banks[layer]
        if x.is_cuda:
            from specter_lab.engine.kernels import int4_experts

            return int4_experts.expert_ffn(x, indices, weights, bank)
        return combine(pair_outputs(x, indices, weights, lambda e: _effective(bank, e)), x.dtype)


def pair_outputs(
    x: Tensor, indices: Tensor, weights: Tensor, expert: Callable[[int], tuple[Tensor, Tensor]], out: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Every (token, choice) computed alone, on a CPU: [T, k, H] float32.

    Args:
        expert: number -> (gate and up [2I, H], down [H, I]).
        out: to be filled in; choices of NOT_NOW are left alone.
    """
    out = torch.zeros(*indices.shape, x.shape[1]) if out is None else out
    for token, choices in enumerate(indices.tolist()):
        for choice, number in enumerate(choices):
            if number != NOT_NOW:
                gate_up, down = expert(number)
                gate, up = (gate_up.to(x.dtype) @ x[token]).chunk(2)
                out[token, choice] = (down.to(x.dtype) @ (silu(gate) * up)).float() * weights[token, choice].float()
    return out


def combine(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum [T, k, H] over the choices, in their order: [T, H]."""
    total = torch.zeros_like(parts[:, 0])
    for choice in range(parts.shape[1]):
        total = total + parts[:, choice]
    return total.to(dtype)


def _effective(bank: Int4Bank, expert: int) -> tuple[Tensor, Tensor]:
    """One expert of an INT4 bank as float32 weights."""
    one = type(bank)(bank.layer, *(type(p)(p.packed[expert : expert + 1], p.scales[expert : expert + 1])
                                   for p in (bank.gate, bank.up, bank.down)))  # fmt: skip
    weights = grid.dequantize_bank(unpack_bank(one))
    return torch.cat([weights.gate[0], weights.up[0]]), weights.down[0]
