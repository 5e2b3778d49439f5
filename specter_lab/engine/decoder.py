"""The lean decoder: one forward pass for grouped-query, biased multi-head and latent attention over a static KV cache.

Draft and target are this one function with the same weights; they differ in who computes the routed experts
(Specter, section SIC). Nothing in it waits for the host, so a pass of fixed length can be a CUDA graph: positions are read
from the device, and where an expert lies is the business of `experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from specter_lab.engine.ops import Ops
from specter_lab.engine.shape import Shape

# (number of the MoE layer, x [T, H], indices [T, k], weights [T, k]) -> [T, H]
Experts = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Linear:
    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]


@dataclass(frozen=True)
class Norm:
    """Root-mean-square norm, or layer norm when there is a bias (Phi)."""

    weight: Tensor  # [H]
    bias: Tensor | None = None


@dataclass(frozen=True)
class Mlp:
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class Attention:
    """Grouped-query: q, k, v, o. Latent: q, then the compressed keys and values and their expansion."""

    q: Linear
    o: Linear
    k: Linear | None = None
    v: Linear | None = None
    compress: Linear | None = None  # [latent + rotary, H]
    latent_norm: Norm | None = None
    expand: Linear | None = None  # [heads * (key without rotary + value), latent]


@dataclass(frozen=True)
class Layer:
    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    router: Tensor | None  # [E, H]; None: a dense layer
    shared: Mlp | None  # shared experts, or the whole of a dense layer
    shared_gate: Linear | None = None  # [1, H]


@dataclass(frozen=True)
class Decoder:
    """Everything but routed experts."""

    shape: Shape
    embedding: Tensor  # [V, H]
    layers: Sequence[Layer]
    norm: Norm
    head: Linear  # [V, H]


@dataclass(frozen=True)
class KvCache:
    """Static keys and values of one request; what lies beyond the committed length is scratch.

    The draft writes its own keys and values behind the committed ones, verification overwrites them: so only the target's
    ever become part of the prefix, and a roll-back is a smaller number (Specter: target-authoritative state).
    """

    keys: Sequence[Tensor]  # per layer [S, KV heads, D]
    values: Sequence[Tensor]  # per layer [S, KV heads, D_v]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


def new_kv_cache(shape: Shape, max_tokens: int, like: Tensor) -> KvCache:
    """An empty cache for `max_tokens` tokens, on the device and in the type of `like`."""
    heads = shape.kv_heads
    keys = [like.new_zeros(max_tokens, heads, shape.key_dim) for _ in range(shape.layers)]
    return KvCache(keys, [like.new_zeros(max_tokens, heads, shape.value_dim) for _ in range(shape.layers)])


@dataclass(frozen=True)
class Passed:
    """What came out of a pass over T tokens."""

    logits: Tensor  # [T, V]
    indices: Tensor  # [L, T, k] experts used in every MoE layer
    weights: Tensor  # [L, T, k]


def forward(decoder: Decoder, ids: Tensor, position: Tensor, kv: KvCache, experts: Experts, ops: Ops) -> Passed:
    """Tokens ids [T] at position, position + 1, ... of a request whose earlier ones lie in `kv`.

    Args:
        position: [1] int64 on the device, tokens before these.
        experts: computes the routed experts of a layer.
    """
    shape = decoder.shape
    positions = position + torch.arange(len(ids), device=ids.device)  # [T]
    rotation = _rotation(shape, positions)
    indices, weights = [], []
    x = decoder.embedding[ids]  # [T, H]
    for number, layer in enumerate(decoder.layers):
        h = ops.norm(x, layer.attention_norm, shape.norm_eps)
        x = x + _attend(shape, layer.attention, h, positions, position, rotation, kv, number, ops)
        h = ops.norm(x, layer.mlp_norm, shape.norm_eps)
        if layer.router is None:
            x = x + _mlp(layer.shared, h, ops)
            continue
        used, factors = route(shape, ops.router_logits(h, layer.router))
        y = experts(len(indices), h, used, factors)
        indices.append(used)
        weights.append(factors)
        if layer.shared is not None:
            shared = _mlp(layer.shared, h, ops)
            if layer.shared_gate is not None:
                shared = torch.sigmoid(ops.linear(h, layer.shared_gate)) * shared
            y = y + shared
        x = x + y
    logits = ops.linear(ops.norm(x, decoder.norm, shape.norm_eps), decoder.head)
    return Passed(logits, torch.stack(indices), torch.stack(weights))


def route(shape: Shape, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Experts [T, k] and their weights [T, k] float32 from router logits [T, E]."""
    if shape.model_type == "phimoe":
        return _sparsemixer(logits, shape.router_jitter)
    weights, indices = logits.float().softmax(dim=-1).topk(shape.top_k, dim=-1)
    if shape.normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return indices, weights * shape.router_scale


def _sparsemixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Phi's router without its training noise (arXiv 2409.12136): the best two, each weighted by a softmax over those
    whose relative distance to it is at most twice the jitter."""
    scores, found, factors = logits, [], []
    for _ in range(2):
        best, index = scores.max(dim=-1, keepdim=True)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        found.append(index)
        factors.append(scores.masked_fill(far, float("-inf")).softmax(dim=-1).gather(-1, index))
        scores = scores.scatter(-1, index, float("-inf"))
    return torch.cat(found, dim=-1), torch.cat(factors, dim=-1).float()


def _attend(
    shape: Shape, weights: Attention, h: Tensor, positions: Tensor, position: Tensor, rotation: tuple[Tensor, Tensor],
    kv: KvCache, layer: int, ops: Ops,
) -> Tensor:  # fmt: skip
    tokens = len(h)
    q = ops.linear(h, weights.q).view(tokens, shape.heads, shape.key_dim)
    if shape.latent:
        plain = shape.key_dim - shape.rotary_dim
        compressed = ops.linear(h, weights.compress)  # [T, latent + rotary]
        latent = ops.norm(compressed[:, : shape.latent].contiguous(), weights.latent_norm, shape.norm_eps)
        expanded = ops.linear(latent, weights.expand).view(tokens, shape.heads, plain + shape.value_dim)
        turned = _rotate_pairs(compressed[:, None, shape.latent :], rotation).expand(-1, shape.heads, -1)
        k, v = torch.cat([expanded[..., :plain], turned], dim=-1), expanded[..., plain:]
        q = torch.cat([q[..., :plain], _rotate_pairs(q[..., plain:], rotation)], dim=-1)
    else:
        k = _rotate_halves(ops.linear(h, weights.k).view(tokens, shape.kv_heads, shape.key_dim), rotation)
        v = ops.linear(h, weights.v).view(tokens, shape.kv_heads, shape.value_dim)
        q = _rotate_halves(q, rotation)
    kv.keys[layer].index_copy_(0, positions, k)
    kv.values[layer].index_copy_(0, positions, v)
    seen = ops.attend(q.contiguous(), kv.keys[layer], kv.values[layer], position, shape.key_dim**-0.5)
    return ops.linear(seen.flatten(1), weights.o)


def _mlp(mlp: Mlp, h: Tensor, ops: Ops) -> Tensor:
    return ops.linear(silu(ops.linear(h, mlp.gate)) * ops.linear(h, mlp.up), mlp.down)


def _rotation(shape: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every rotary angle: [T, 1, rotary / 2] float32."""
    exponents = torch.arange(0, shape.rotary_dim, 2, device=positions.device) / shape.rotary_dim
    angles = positions[:, None].float() * shape.rope_theta**-exponents
    return angles.cos()[:, None], angles.sin()[:, None]


def _rotate_halves(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Element i turns with element i + D / 2 (Qwen, Phi): x [T, heads, D]."""
    (cos, sin), (a, b) = rotation, x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def _rotate_pairs(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Element 2 i turns with element 2 i + 1 (DeepSeek): x [T, heads, D]."""
    (cos, sin), (a, b) = rotation, x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(x.dtype)
