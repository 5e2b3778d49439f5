"""The draft's routed experts in INT4: one launch for gate and up, one for down, for all experts (Specter, SEE).

A tensor-core tile has at least 8 columns. One token fills them with 8 groups of its input (`spread`): tile row
(output, g) meets column g, and the diagonal is the result. So one tile row is 64 contiguous bytes of codes, everything
a program reads is in flight at once, and the sum over a token's experts is more columns of the same launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from specter_lab.engine.kernels.int4_kernels import down, gate_up
from specter_lab.engine.kernels.launch import overlaps_launches
from specter_lab.engine.kernels.routes import Routes, combine, route

if TYPE_CHECKING:
    from specter_lab.compress.int4 import Int4Bank, Int4Weights


@dataclass(frozen=True)
class Int4Tiles:
    """Shape of one program."""

    outputs: int  # weight rows; times `spread` a multiple of 16 for every warp
    spread: int  # groups of 128 inputs side by side
    tokens: int  # times `spread` at least 8
    depth: int  # tiles in flight
    warps: int


@dataclass(frozen=True)
class Int4Launch:
    """Shapes of the two launches."""

    gate_up: Int4Tiles
    down: Int4Tiles


ONE_TOKEN = Int4Launch(Int4Tiles(4, 8, 1, depth=2, warps=1), Int4Tiles(4, 8, 1, depth=6, warps=2))
FEW_TOKENS = Int4Launch(Int4Tiles(16, 2, 4, depth=2, warps=1), Int4Tiles(16, 2, 4, depth=2, warps=1))
MANY_TOKENS = Int4Launch(Int4Tiles(64, 1, 8, depth=2, warps=4), Int4Tiles(64, 1, 8, depth=2, warps=4))
_FEW = 8  # tokens


def expert_ffn(
    x: Tensor, indices: Tensor, weights: Tensor, bank: Int4Bank, *, one_by_one: bool = False,
    tiles: Int4Launch | None = None,
) -> Tensor:  # fmt: skip
    """The routed experts of one MoE layer: sum over a token's experts of weight * down(silu(gate x) * up x).

    One token takes two launches; more take a sort before and a sum after them.

    Args:
        x: [T, H] bfloat16, T at most 64.
        indices: [T, k] experts used; a value outside 0 .. E-1 adds nothing.
        weights: [T, k] factors, any float type.
        bank: the layer in the INT4 layout, on the same device.
        one_by_one: launch each expert by itself, as a runtime without a fused kernel does (the baseline).
        tiles: shapes of the two launches.

    Returns:
        [T, H] bfloat16; the product of gate and up is rounded to bfloat16 in between, sums are float32.

    Raises:
        ValueError: wrong dtype or layout, or too many tokens.
    """
    tokens, top_k = indices.shape
    num_experts, width, hidden = _check(x, weights, bank)
    routes = route(indices, num_experts)
    out = torch.empty_like(x)
    if tokens == 0:
        return out
    tiles = tiles or (ONE_TOKEN if routes.direct else FEW_TOKENS if tokens <= _FEW else MANY_TOKENS)
    act = torch.empty(tokens * top_k, width, dtype=torch.bfloat16, device=x.device)  # [P, I]
    if routes.direct and top_k > 1 and not one_by_one:
        _launch_gate_up(x, bank, routes, act, tiles.gate_up, 0, top_k)
        _launch_down(act, bank.down, weights, routes, out, tiles.down, 0, 1, fused=top_k)
        return out
    parts = torch.empty(tokens * top_k, hidden, dtype=torch.float32, device=x.device)  # [P, H]
    step = 1 if one_by_one else routes.slots
    for slot in range(0, routes.slots, step):
        _launch_gate_up(x, bank, routes, act, tiles.gate_up, slot, step)
        _launch_down(act, bank.down, weights, routes, parts, tiles.down, slot, step, fused=1)
    return combine(parts, indices, num_experts, out)


def _check(x: Tensor, weights: Tensor, bank: Int4Bank) -> tuple[int, int, int]:
    num_experts, width, half = bank.gate.packed.shape
    if x.dtype != torch.bfloat16 or x.shape[-1] != 2 * half or not (x.is_contiguous() and weights.is_contiguous()):
        raise ValueError(f"inputs must be contiguous [T, {2 * half}] bfloat16 with contiguous weights [T, k]")
    if 2 * half % 4 or width % 4:
        raise ValueError(f"rows of {2 * half} and {width} weights: the INT4 kernels need multiples of 4")
    return num_experts, width, 2 * half


def _shape(projection: Int4Weights) -> dict[str, int]:
    """Groups per row and 16-bit words per group."""
    groups = projection.scales.shape[-1]
    words = projection.packed.shape[-1] // 2 // groups
    return {"GROUPS": groups, "WORDS": words}


def _launch_gate_up(
    x: Tensor, bank: Int4Bank, routes: Routes, act: Tensor, tiles: Int4Tiles, slot: int, slots: int
) -> None:
    width = act.shape[1]
    shape, pdl = _shape(bank.gate), overlaps_launches(x.device)
    grid = (triton.cdiv(width, tiles.outputs), slots, triton.cdiv(routes.tokens, tiles.tokens))
    gate_up[grid](
        x.view(torch.int64), bank.gate.packed.view(torch.int16), bank.gate.scales,
        bank.up.packed.view(torch.int16), bank.up.scales, act,
        routes.expert, routes.start, routes.count, routes.order, slot, routes.num_experts, width,
        TOP_K=routes.top_k, **shape, OUT_WORDS=_shape(bank.down)["WORDS"], ROWS=tiles.outputs, SPREAD=tiles.spread, TOKENS=tiles.tokens,
        DEPTH=tiles.depth, DIRECT=routes.direct, PDL=pdl, num_warps=tiles.warps, launch_pdl=pdl,
    )  # fmt: skip


def _launch_down(
    act: Tensor, part: Int4Weights, weights: Tensor, routes: Routes, out: Tensor, tiles: Int4Tiles,
    slot: int, slots: int, fused: int,
) -> None:  # fmt: skip
    hidden = out.shape[1]
    shape, pdl = _shape(part), overlaps_launches(act.device)
    grid = (triton.cdiv(hidden, tiles.outputs), slots, triton.cdiv(routes.tokens, tiles.tokens))
    down[grid](
        act, part.packed.view(torch.int16), part.scales, weights, out,
        routes.expert, routes.start, routes.count, routes.order, slot, routes.num_experts, hidden,
        FUSED=fused, **shape, ROWS=tiles.outputs, SPREAD=tiles.spread,
        TOKENS=tiles.tokens, DEPTH=tiles.depth, DIRECT=routes.direct, PDL=pdl, num_warps=tiles.warps, launch_pdl=pdl,
    )  # fmt: skip
