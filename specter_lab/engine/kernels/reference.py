"""What the kernels compute, in plain torch and one row at a time: the oracle of their tests, and the CPU's engine.

Because every row is computed alone, these are row-invariant by construction. Products and sums are float32; the only
rounding in between is the one the kernels share (gate times up, to the type of the input).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import silu

if TYPE_CHECKING:
    from specter_lab.compress.int4 import Int4Bank, Int4Weights


def int4_rows(projection: Int4Weights, expert: int) -> Tensor:
    """Weights [out, in] float32 of one expert: nibbles (even input low, stored as code + 8) times the group's scale."""
    packed, scales = projection.packed[expert], projection.scales[expert].float()  # [out, in / 2], [out, G]
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).float() - 8  # [out, in]
    return codes * scales.repeat_interleave(codes.shape[1] // scales.shape[1], dim=1)


def expert_row(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One expert [I, H], [I, H], [H, I] (float32) on one token x [H] -> [H] float32."""
    row = x.float()
    act = (silu(gate @ row) * (up @ row)).to(x.dtype)
    return down @ act.float()


def int4_expert_ffn(x: Tensor, indices: Tensor, weights: Tensor, bank: Int4Bank) -> Tensor:
    """The routed experts of one layer in the INT4 layout; see `int4_experts.expert_ffn`.

    Args:
        x: [T, H] any float type.
        indices: [T, k] experts used; a value outside 0 .. E-1 adds nothing.
        weights: [T, k] factors.
        bank: the layer in the INT4 layout.

    Returns:
        [T, H] of the type of `x`.
    """
    used = {int(e) for e in indices.flatten() if 0 <= e < bank.gate.packed.shape[0]}
    experts = {e: tuple(int4_rows(part, e) for part in (bank.gate, bank.up, bank.down)) for e in used}
    return _mix(x, indices, weights, experts)


def expert_ffn(x: Tensor, indices: Tensor, weights: Tensor, experts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The routed experts of one layer in full precision; see `grouped_gemm.expert_ffn`.

    Args:
        x: [T, H] any float type.
        indices: [T, k] experts used; a value outside 0 .. E-1 adds nothing.
        weights: [T, k] factors.
        experts: E times (gate and up [2I, H], down [H, I]).

    Returns:
        [T, H] of the type of `x`.
    """
    used = {int(e) for e in indices.flatten() if 0 <= e < len(experts)}
    return _mix(x, indices, weights, {e: (*experts[e][0].float().chunk(2), experts[e][1].float()) for e in used})


def _mix(x: Tensor, indices: Tensor, weights: Tensor, experts: dict[int, tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.float32)  # [T, H]
    for token, chosen in enumerate(indices.tolist()):
        for choice, expert in enumerate(chosen):
            if expert in experts:
                out[token] += weights[token, choice].float() * expert_row(x[token], *experts[expert])
    return out.to(x.dtype)


def channel_ffn(x: Tensor, experts: Tensor, factors: Tensor, wi: Tensor, wo: Tensor) -> Tensor:
    """What top-1 experts add, factor * wo(relu(wi x)), row by row; see `channel_gemm.expert_ffn`.

    Args:
        x: [T, H] any float type.
        experts: [T]; a value outside 0 .. E-1 gives a row of zeros.
        factors: [T].
        wi: [E, H, F] effective weights, inputs by outputs.
        wo: [E, F, H].

    Returns:
        [T, H] of the type of `x`.
    """
    out = torch.zeros_like(x)
    for token, expert in enumerate(experts.tolist()):
        if 0 <= expert < len(wi):
            act = (x[token].float() @ wi[expert].float()).relu().to(x.dtype)
            out[token] = (factors[token].float() * (act.float() @ wo[expert].float())).to(x.dtype)
    return out


def token_tiles(experts: Tensor, num_experts: int, tile: int) -> list[tuple[int, list[int]]]:
    """Expert and tokens of tiles of at most `tile` tokens, expert after expert; see `channel_gemm.sort_tokens`."""
    tokens = [[token for token, chosen in enumerate(experts.tolist()) if chosen == e] for e in range(num_experts)]
    return [(e, mine[first : first + tile]) for e, mine in enumerate(tokens) for first in range(0, len(mine), tile)]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N]; see `dense.linear`."""
    wide = weight.float()
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    for token, row in enumerate(x.float()):
        out[token] = wide @ row
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype or x.dtype)


def gated(x: Tensor, weight: Tensor, width: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """silu(gate) * up [T, I] of the first 2 I rows of `weight`, which alternate, and the others [T, R]; see `dense.gated`."""
    whole = linear(x, weight, bias, out_dtype=torch.float32)
    gate, up = whole[:, 0 : 2 * width : 2], whole[:, 1 : 2 * width : 2]
    return (silu(gate) * up).to(x.dtype), whole[:, 2 * width :]


def attend(q: Tensor, k: Tensor, v: Tensor, position: int, scale: float) -> Tensor:
    """Causal attention of T new tokens over a cache that holds them already; see `attention.attend`.

    Args:
        q: [T, heads, D]; token t stands at position `position` + t and sees itself.
        k: [S, KV heads, D].
        v: [S, KV heads, D_v].
        position: tokens before the new ones.
        scale: factor on the scores.

    Returns:
        [T, heads, D_v].
    """
    (tokens, heads, _), kv_heads = q.shape, k.shape[1]
    out = torch.empty(tokens, heads, v.shape[2], dtype=q.dtype, device=q.device)
    for token in range(tokens):
        seen = position + token + 1
        for head in range(heads):
            source = head * kv_heads // heads
            scores = scale * (k[:seen, source].float() @ q[token, head].float())  # [seen]
            out[token, head] = scores.softmax(dim=0) @ v[:seen, source].float()
    return out
