"""Computing routed experts: by kernels that are told their addresses, or row by row on a CPU.

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
from specter_lab.engine.decoder import NOT_NOW
from specter_lab.engine.experts import ExpertMemory
from specter_lab.engine.kernels.launch import MAX_TOKENS


def new_parts(x: Tensor, indices: Tensor) -> Tensor:
    """Room for every choice's weighted output: x [T, H], indices [T, k] -> [T, k, H] float32."""
    return torch.empty(*indices.shape, x.shape[1], dtype=torch.float32, device=x.device)


def compute(
    memory: ExpertMemory, layer: int, x: Tensor, indices: Tensor, weights: Tensor, parts: Tensor, addresses: Tensor
) -> None:
    """Fill in `parts` [T, k, H] with the target's experts, read wherever `addresses` [E] say; needs no host on a GPU.

    Choices of NOT_NOW are left as they are.
    """
    if x.is_cuda:
        from specter_lab.engine.kernels import grouped_gemm

        slab = memory.device.data_ptr(), memory.device.data_ptr() + memory.device.nbytes
        cut = (part.split(MAX_TOKENS) for part in (x, indices, weights, parts))
        for some in zip(*cut):
            grouped_gemm.expert_parts(*some[:3], addresses, memory.shape.expert_width, some[3], slab=slab)
    else:
        pair_outputs(x, indices, weights, lambda e: memory.pieces(memory.block(layer, e)), parts)


def combine(parts: Tensor, indices: Tensor, num_experts: int, dtype: torch.dtype) -> Tensor:
    """Sum [T, k, H] over the choices, in their order: [T, H]."""
    if parts.is_cuda:
        from specter_lab.engine.kernels import routes

        out = torch.empty(len(parts), parts.shape[2], dtype=dtype, device=parts.device)
        return routes.combine(parts.flatten(0, 1), indices, num_experts, out)
    total = torch.zeros_like(parts[:, 0])
    for choice, computed in enumerate((indices >= 0).unbind(1)):
        total = total + torch.where(computed[:, None], parts[:, choice], 0.0)
    return total.to(dtype)


@dataclass(frozen=True)
class DraftExperts:
    """The draft's INT4 experts, all of them resident."""

    banks: tuple[Int4Bank, ...]  # per MoE layer, on the device
    name: str = "int4"  # whose codes these are (`engine.draft`)

    @property
    def nbytes(self) -> int:
        return sum(part.packed.nbytes + part.scales.nbytes for b in self.banks for part in (b.gate, b.up, b.down))

    def __call__(self, layer: int, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        bank = self.banks[layer]
        if x.is_cuda:
            from specter_lab.engine.kernels import int4_experts

            return int4_experts.expert_ffn(x, indices, weights, bank)
        parts = new_parts(x, indices)
        pair_outputs(x, indices, weights, lambda e: _effective(bank, e), parts)
        return combine(parts, indices, len(bank.gate.packed), x.dtype)


def pair_outputs(
    x: Tensor, indices: Tensor, weights: Tensor, expert: Callable[[int], tuple[Tensor, Tensor]], parts: Tensor
) -> None:
    """Every (token, choice) computed alone, on a CPU, into `parts` [T, k, H]; choices of NOT_NOW are left alone.

    Args:
        expert: number -> (gate and up [2I, H], down [H, I]).
    """
    for token, choices in enumerate(indices.tolist()):
        for choice, number in enumerate(choices):
            if number != NOT_NOW:
                gate_up, down = expert(number)
                gate, up = (gate_up.to(x.dtype) @ x[token]).chunk(2)
                parts[token, choice] = (down.to(x.dtype) @ (silu(gate) * up)).float() * weights[token, choice].float()


def _effective(bank: Int4Bank, expert: int) -> tuple[Tensor, Tensor]:
    """One expert of an INT4 bank as float32 weights."""
    one = type(bank)(bank.layer, *(type(p)(p.packed[expert : expert + 1], p.scales[expert : expert + 1])
                                   for p in (bank.gate, bank.up, bank.down)))  # fmt: skip
    weights = grid.dequantize_bank(unpack_bank(one))
    return torch.cat([weights.gate[0], weights.up[0]]), weights.down[0]
