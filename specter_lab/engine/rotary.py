"""Rotary embedding and the KV cache's new entries, in plain torch; `kernels.rotary` does the same in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from specter_lab.engine.shape import Shape

Table = tuple[Tensor, Tensor]  # cosine and sine, [S, rotary / 2] float32 each


def rotary_table(shape: Shape, positions: int, device: torch.device) -> Table:
    """Cosine and sine of every rotary angle of positions 0, 1, ..."""
    exponents = torch.arange(0, shape.rotary_dim, 2, device=device) / shape.rotary_dim
    angles = torch.arange(positions, device=device)[:, None].float() * shape.rope_theta**-exponents
    return angles.cos(), angles.sin()


def rotate_and_store(
    shape: Shape, entry: Tensor, expanded: Tensor | None, keys: Tensor, values: Tensor, table: Table, position: Tensor
) -> Tensor:  # fmt: skip
    """Rotate queries and keys of T new tokens, T / B of each request in turn, and write keys and values behind its others.

    Args:
        entry: [T, N] rows of q, k, v; with latent attention of q and the compressed keys and values.
        expanded: [T, heads * (key without rotary + value)] with latent attention.
        keys: [B, S, KV heads, D], written.
        values: [B, S, KV heads, D_v], written.
        position: [B] int64 on the device, tokens of each request before these.

    Returns:
        Rotated queries [T, heads, D], contiguous.
    """
    tokens, queries = len(entry), shape.heads * shape.key_dim
    lane, place = lanes_and_places(tokens, position)
    positions = position[lane] + place  # [T]
    rotation = tuple(part[positions][:, None] for part in table)  # [T, 1, rotary / 2]
    q, rest = entry[:, :queries].view(tokens, shape.heads, shape.key_dim), entry[:, queries:]
    if shape.latent:
        plain = shape.key_dim - shape.rotary_dim
        expanded = expanded.view(tokens, shape.heads, plain + shape.value_dim)
        turned = _rotate_pairs(rest[:, None, shape.latent :], rotation).expand(-1, shape.heads, -1)
        k, v = torch.cat([expanded[..., :plain], turned], dim=-1), expanded[..., plain:]
        q = torch.cat([q[..., :plain], _rotate_pairs(q[..., plain:], rotation)], dim=-1)
    else:
        k, v = rest.split([shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim], dim=1)
        k, v = (part.unflatten(1, (shape.kv_heads, -1)) for part in (k, v))
        k, q = _rotate_halves(k, rotation), _rotate_halves(q, rotation)
    keys[lane, positions] = k
    values[lane, positions] = v
    return q.contiguous()


def lanes_and_places(tokens: int, position: Tensor) -> tuple[Tensor, Tensor]:
    """Of each of T tokens its request, and how many of it come before: [T] each."""
    number = torch.arange(tokens, device=position.device)
    each = max(1, tokens // len(position))
    return number // each, number % each


def _rotate_halves(x: Tensor, rotation: Table) -> Tensor:
    """Element i turns with element i + D / 2 (Qwen, Phi): x [T, heads, D]."""
    (cos, sin), (a, b) = rotation, x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def _rotate_pairs(x: Tensor, rotation: Table) -> Tensor:
    """Element 2 i turns with element 2 i + 1 (DeepSeek): x [T, heads, D]."""
    (cos, sin), (a, b) = rotation, x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(x.dtype)
