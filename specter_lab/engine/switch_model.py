"""A Switch encoder-decoder as plain tensors: read from transformers' class, or random in a given geometry.

The arithmetic is T5's: no biases, RMS norms, relative position bias of the first layer for all, scores not scaled, logits
from the tied embedding scaled by d^-0.5. Routers work in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from specter_lab.engine.switch_experts import Experts, SortedExperts
from specter_lab.engine.switch_ops import rms_norm, route
from specter_lab.models.switch import SwitchGeometry

HEAD_DIM = 64  # of random models
_FUSED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # not cuDNN: it makes a plan for every new shape of a batch
MakeExperts = Callable[[Tensor, Tensor], Experts]  # (wi [E, H, F], wo [E, F, H])


@dataclass(frozen=True)
class Attention:
    """Projections [out, in] of one attention, and the norm before it."""

    norm: Tensor  # [H]
    qkv: Tensor  # [3 heads D, H]
    o: Tensor  # [H, heads D]

    @property
    def q(self) -> Tensor:
        return self.qkv[: self.o.shape[1]]

    @property
    def kv(self) -> Tensor:
        return self.qkv[self.o.shape[1] :]


@dataclass(frozen=True)
class FeedForward:
    """The layer after attention: dense (wi, wo) or sparse (router, experts)."""

    norm: Tensor  # [H]
    wi: Tensor | None = None  # [F, H]
    wo: Tensor | None = None  # [H, F]
    router: Tensor | None = None  # [E, H] float32
    experts: Experts | None = None


@dataclass(frozen=True)
class Layer:
    attention: Attention
    cross: Attention | None  # decoder only
    feed_forward: FeedForward


@dataclass(frozen=True)
class SwitchModel:
    """All tensors of a translator, and how to compute with them."""

    embedding: Tensor  # [V, H]
    encoder: tuple[Layer, ...]
    decoder: tuple[Layer, ...]
    encoder_norm: Tensor
    decoder_norm: Tensor
    encoder_bias: Tensor  # [buckets, heads]
    decoder_bias: Tensor
    heads: int
    max_distance: int
    eps: float
    pad: int
    end: int

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def num_experts(self) -> int:
        return next(len(layer.feed_forward.router) for layer in self.decoder if layer.feed_forward.router is not None)

    @property
    def sparse_decoder_layers(self) -> int:
        return sum(layer.feed_forward.router is not None for layer in self.decoder)


def read_switch(model: PreTrainedModel, make_experts: MakeExperts = SortedExperts) -> SwitchModel:
    """The tensors of a SwitchTransformersForConditionalGeneration; experts as `make_experts` wants them."""
    config = model.config

    def attention(module: torch.nn.Module, name: str) -> Attention:
        inner = getattr(module, name)
        q, k, v, o = (getattr(inner, part).weight.detach() for part in "qkvo")
        return Attention(module.layer_norm.weight.detach(), torch.cat((q, k, v)), o)

    def feed_forward(module: torch.nn.Module) -> FeedForward:
        norm, mlp = module.layer_norm.weight.detach(), module.mlp
        if not module.is_sparse:
            return FeedForward(norm, mlp.wi.weight.detach(), mlp.wo.weight.detach())
        wi, wo = (
            torch.stack([getattr(e, name).weight.detach().t() for e in mlp.experts.values()]) for name in ("wi", "wo")
        )
        return FeedForward(norm, router=mlp.router.classifier.weight.detach().float(), experts=make_experts(wi, wo))

    def layers(stack: torch.nn.Module) -> tuple[Layer, ...]:
        return tuple(
            Layer(
                attention(block.layer[0], "SelfAttention"),
                attention(block.layer[1], "EncDecAttention") if stack.is_decoder else None,
                feed_forward(block.layer[-1]),
            )
            for block in stack.block
        )

    biases = (
        stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.detach()
        for stack in (model.encoder, model.decoder)
    )
    return SwitchModel(
        model.shared.weight.detach(), layers(model.encoder), layers(model.decoder),
        model.encoder.final_layer_norm.weight.detach(), model.decoder.final_layer_norm.weight.detach(), *biases,
        config.num_heads, config.relative_attention_max_distance, config.layer_norm_epsilon, config.pad_token_id,
        config.eos_token_id,
    )  # fmt: skip


def random_switch(
    geometry: SwitchGeometry, make_experts: MakeExperts, *, dtype: torch.dtype, device: str, seed: int = 0
) -> SwitchModel:
    """Random weights in full size, where no trained model of that size is: times and bytes, not translations."""
    draw = torch.Generator(device).manual_seed(seed)
    hidden, ffn = geometry.hidden, geometry.ffn

    def matrix(*shape: int, inputs: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device=device).normal_(0, inputs**-0.5, generator=draw)

    def one() -> Tensor:
        return torch.ones(hidden, dtype=dtype, device=device)

    def attention() -> Attention:
        made = Attention(one(), matrix(3 * hidden, hidden, inputs=hidden), matrix(hidden, hidden, inputs=hidden))
        made.q.mul_(HEAD_DIM**-0.5)
        return made

    def feed_forward(sparse: bool) -> FeedForward:
        if not sparse:
            return FeedForward(one(), matrix(ffn, hidden, inputs=hidden), matrix(hidden, ffn, inputs=ffn))
        wi = matrix(geometry.experts, hidden, ffn, inputs=hidden)
        wo = matrix(geometry.experts, ffn, hidden, inputs=ffn)
        return FeedForward(
            one(),
            router=matrix(geometry.experts, hidden, inputs=hidden, kind=torch.float32),
            experts=make_experts(wi, wo),
        )

    encoder = tuple(Layer(attention(), None, feed_forward(i % 2 == 1)) for i in range(geometry.encoder_layers))
    decoder = tuple(Layer(attention(), attention(), feed_forward(i % 2 == 1)) for i in range(geometry.decoder_layers))
    heads = hidden // HEAD_DIM
    bias = [matrix(32, heads, inputs=hidden) for _ in range(2)]
    return SwitchModel(
        matrix(geometry.vocab, hidden, inputs=1), encoder, decoder, one(), one(), *bias, heads, 128, 1e-6, 0, 2
    )


def position_bias(model: SwitchModel, table: Tensor, queries: int, keys: int, *, causal: bool) -> Tensor:
    """[heads, queries, keys] relative position bias; the buckets are T5's (Raffel et al. 2020), as the class has them."""
    distance = torch.arange(keys, device=table.device)[None, :] - torch.arange(queries, device=table.device)[:, None]
    buckets = len(table) if causal else len(table) // 2
    first = 0 if causal else (distance > 0).long() * buckets
    distance = (-distance).clamp_min(0) if causal else distance.abs()
    exact = buckets // 2
    scaled = (distance.clamp_min(1).float() / exact).log() / torch.tensor(model.max_distance / exact).log()
    far = (exact + (scaled * (buckets - exact)).long()).clamp_max(buckets - 1)
    return table[first + torch.where(distance < exact, distance, far)].permute(2, 0, 1)


def aligned(bias: Tensor) -> Tensor:
    """The same numbers with keys side by side and rows at multiples of 8: else fused attention refuses or copies them."""
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % 8)).contiguous()[..., :keys]


def heads_of(x: Tensor, parts: int, heads: int) -> Tensor:
    """[B, T, parts heads D] -> [parts, B, heads, T, D]."""
    return x.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4)


def attend_(x: Tensor, part: Attention, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> None:
    """Add to x [B T, H] what q [B, heads, T, D] finds in k and v; `bias` is added to the scores, which T5 does not scale."""
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
    x.addmm_(found.transpose(1, 2).reshape(len(x), -1), part.o.t())


def feed_forward_(model: SwitchModel, layer: FeedForward, x: Tensor, finished: Tensor | None = None) -> Tensor | None:
    """Add to x [N, H] the layer's result; the experts [N] that a sparse one used."""
    hidden = rms_norm(x, layer.norm, model.eps)
    if layer.router is None:
        x.addmm_(F.linear(hidden, layer.wi).relu_(), layer.wo.t())
        return None
    experts, factors = route(layer.router, hidden, finished)
    layer.experts(hidden, experts, factors, x)
    return experts


def encode(model: SwitchModel, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Encoder states [B, S, H] and the additive mask [B, 1, 1, S] of sources [B, S], padded on the right.

    Padding is given the id past the last expert, so no expert computes it.
    """
    padding = sources == model.pad  # [B, S]
    x = F.embedding(sources.flatten(), model.embedding)  # [B S, H]
    mask = torch.zeros_like(padding, dtype=x.dtype).masked_fill(padding, torch.finfo(x.dtype).min)[:, None, None, :]
    bias = aligned(position_bias(model, model.encoder_bias, sources.shape[1], sources.shape[1], causal=False) + mask)
    with sdpa_kernel(_FUSED) if x.is_cuda else nullcontext():
        for layer in model.encoder:
            part = layer.attention
            hidden = rms_norm(x, part.norm, model.eps).view(*sources.shape, -1)
            attend_(x, part, *heads_of(F.linear(hidden, part.qkv), 3, model.heads), bias)
            feed_forward_(model, layer.feed_forward, x, padding.flatten())
    return rms_norm(x, model.encoder_norm, model.eps).view(*sources.shape, -1), mask
