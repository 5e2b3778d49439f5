"""The lean decoder: one forward pass for grouped-query, biased multi-head and latent attention over a static KV cache.

Draft and target are this one function with the same weights; they differ in who computes the routed experts
(Specter, section SIC). Nothing in it waits for the host, so a pass of fixed length can be a CUDA graph: positions are read
from the device, and where an expert lies is the business of `experts`. Weights that meet the same input are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specter_lab.engine.ops import Ops
from specter_lab.engine.rotary import rotary_table
from specter_lab.engine.shape import Shape

NOT_NOW = -1  # an index that no kernel computes
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
class Attention:
    """Grouped-query: rows of q, k and v. Latent: rows of q and of the compressed keys and values, and their expansion."""

    entry: Linear  # [heads D + KV heads (D + D_v), H], or [heads D + latent + rotary, H]
    o: Linear
    latent_norm: Norm | None = None
    expand: Linear | None = None  # [heads * (key without rotary + value), latent]


@dataclass(frozen=True)
class Mlp:
    """What follows attention, but for routed experts: the shared experts, or the whole of a dense layer."""

    entry: Linear  # [2I + E + G, H]: gate and up by turns (gate 0, up 0, gate 1, ...), the router, the shared experts' gate
    down: Linear | None  # [H, I]; None: no shared experts, I is 0
    width: int  # I
    experts: int  # E; 0: a dense layer


@dataclass(frozen=True)
class Layer:
    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp


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
    """Static keys and values of B requests, a lane each; what lies beyond a lane's committed length is scratch.

    The draft writes its own keys and values behind the committed ones, verification overwrites them: so only the target's
    ever become part of the prefix, and a roll-back is a smaller number (Specter: target-authoritative state).
    """

    keys: Sequence[Tensor]  # per layer [B, S, KV heads, D]
    values: Sequence[Tensor]  # per layer [B, S, KV heads, D_v]
    cos: Tensor  # [S, rotary / 2] float32, of every position's rotary angles
    sin: Tensor  # [S, rotary / 2]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values, self.cos, self.sin))

    @property
    def max_tokens(self) -> int:
        return self.keys[0].shape[1]

    def lanes(self, some: slice) -> KvCache:
        """Some requests' part, the same memory."""
        keys, values = ([part[some] for part in parts] for parts in (self.keys, self.values))
        return KvCache(keys, values, self.cos, self.sin)


def new_kv_cache(shape: Shape, max_tokens: int, like: Tensor, lanes: int = 1) -> KvCache:
    """An empty cache for `lanes` requests of `max_tokens` tokens, on the device and in the type of `like`."""
    heads = shape.kv_heads
    keys = [like.new_zeros(lanes, max_tokens, heads, shape.key_dim) for _ in range(shape.layers)]
    values = [like.new_zeros(lanes, max_tokens, heads, shape.value_dim) for _ in range(shape.layers)]
    return KvCache(keys, values, *rotary_table(shape, max_tokens, like.device))


@dataclass(frozen=True)
class Passed:
    """What came out of a pass over T tokens."""

    logits: Tensor | None  # [T, V]
    indices: Tensor  # [L, T, k] experts used in every MoE layer
    weights: Tensor  # [L, T, k] float32


def forward(
    decoder: Decoder, ids: Tensor, position: Tensor, kv: KvCache, experts: Experts, ops: Ops, live: Tensor | None = None,
    *, logits: bool = True,
) -> Passed:  # fmt: skip
    """Tokens ids [T] of B requests whose earlier ones lie in `kv`: T / B of the first, at its position, position + 1, ...,
    then as many of the second.

    Args:
        position: [B] int64 on the device, tokens of each request before these.
        experts: computes the routed experts of a layer.
        live: [T] which tokens count; the others use no routed experts (NOT_NOW in `indices`), and their results mean nothing.
        logits: whether they are wanted; a prompt is read for its keys and values.
    """
    shape, eps = decoder.shape, decoder.shape.norm_eps
    routed = (len(shape.moe_layers), len(ids), shape.top_k)
    indices, weights = ids.new_empty(routed), ids.new_empty(routed, dtype=torch.float32)  # [L, T, k]
    moe, dead = 0, None if live is None else ~live[:, None]
    x = decoder.embedding[ids]  # [T, H]
    h = ops.norm(x, decoder.layers[0].attention_norm, eps)
    for number, layer in enumerate(decoder.layers):
        seen = _attend(shape, layer.attention, h, position, kv, number, ops)
        x, h = ops.add_norm(x, ops.linear(seen, layer.attention.o), layer.mlp_norm, eps)
        mlp, norm_after = layer.mlp, _norm_after(decoder, number)
        act, rest = ops.enter(h, mlp.entry, mlp.width)  # silu(gate) * up [T, I], router and shared gate [T, E + G]
        if not mlp.experts:
            x, h = ops.add_norm(x, ops.linear(act, mlp.down), norm_after, eps)
            continue
        ops.route(shape, rest[:, : mlp.experts], indices[moe], weights[moe])
        if dead is not None:
            indices[moe].masked_fill_(dead, NOT_NOW)
        shared = ops.linear(act, mlp.down) if mlp.down else None  # asks for its weights while the router runs
        y = experts(moe, h, indices[moe], weights[moe])
        x, h = ops.add_norm(x, y, norm_after, eps, shared, rest[:, mlp.experts :])
        moe += 1
    return Passed(ops.linear(h, decoder.head) if logits else None, indices, weights)


def _norm_after(decoder: Decoder, layer: int) -> Norm:
    last = layer + 1 == len(decoder.layers)
    return decoder.norm if last else decoder.layers[layer + 1].attention_norm


def _attend(
    shape: Shape, weights: Attention, h: Tensor, position: Tensor, kv: KvCache, layer: int, ops: Ops
) -> Tensor:  # fmt: skip
    entry, expanded = ops.linear(h, weights.entry), None
    if shape.latent:
        queries = shape.heads * shape.key_dim
        latent = ops.norm(entry[:, queries : queries + shape.latent], weights.latent_norm, shape.norm_eps)
        expanded = ops.linear(latent, weights.expand)  # [T, heads * (key without rotary + value)]
    keys, values = kv.keys[layer], kv.values[layer]
    q = ops.rotate_and_store(shape, entry, expanded, keys, values, (kv.cos, kv.sin), position)  # [T, heads, D]
    return ops.attend(q, keys, values, position, shape.key_dim**-0.5).flatten(1)
