"""Random weights in a model's full geometry, where no trained model of that size is: passes and bytes can be timed.

Routing and acceptance mean nothing here, except that draft and target share their weights: the draft's experts are the
target's, rounded to INT4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specter_lab.engine.decoder import Attention, Decoder, Layer, Linear, Mlp, Norm
from specter_lab.engine.shape import shape_of
from specter_lab.engine.weights import Weights, new_weights
from specter_lab.models.originals import config_for

SCALE = 0.02  # standard deviation of every weight but the norms', which are 1


def random_weights(model: str, *, device: str | None = None, seed: int = 0) -> Weights:
    """Weights with the sizes of `model` (`models.originals.config_for`)."""
    config = config_for(model)

    def read(host: Tensor, where: str) -> Decoder:
        generator = torch.Generator(where).manual_seed(seed)
        for layer in host:  # a layer is drawn on the device and copied at once
            layer.copy_(_normal(layer.shape, host.dtype, generator))
        return random_decoder(config, host.dtype, generator)

    return new_weights(config, f"random {model}", None, device, read)


def random_decoder(config: PretrainedConfig, dtype: torch.dtype, generator: torch.Generator) -> Decoder:
    """Everything but routed experts, with the shapes `load.read_decoder` gives."""
    shape = shape_of(config)
    heads, hidden = shape.heads, shape.hidden
    attention_bias = shape.model_type == "qwen2_moe" or getattr(config, "attention_bias", False)
    centred = shape.model_type == "phimoe"  # layer norm
    shared_width, shared_gates = {
        "qwen2_moe": (getattr(config, "shared_expert_intermediate_size", 0), 1),
        "deepseek_v2": ((getattr(config, "n_shared_experts", 0) or 0) * shape.expert_width, 0),
    }.get(shape.model_type, (0, 0))

    def linear(outputs: int, inputs: int, biased: bool = False) -> Linear:
        return Linear(_normal((outputs, inputs), dtype, generator),
                      _normal((outputs,), dtype, generator) if biased else None)  # fmt: skip

    def norm(width: int, centred: bool = centred) -> Norm:
        weight = torch.ones(width, dtype=dtype, device=generator.device)
        return Norm(weight, torch.zeros_like(weight) if centred else None)

    def attention() -> Attention:
        o = linear(hidden, heads * shape.value_dim, attention_bias and shape.model_type == "phimoe")
        if not shape.latent:
            keys_and_values = shape.kv_heads * (shape.key_dim + shape.value_dim)
            return Attention(linear(heads * shape.key_dim + keys_and_values, hidden, attention_bias), o)
        entry = linear(heads * shape.key_dim + shape.latent + shape.rotary_dim, hidden)
        expand = linear(heads * (shape.key_dim - shape.rotary_dim + shape.value_dim), shape.latent)
        return Attention(entry, o, norm(shape.latent), expand)

    def mlp(layer: int) -> Mlp:
        routed = layer in shape.moe_layers
        width = shared_width if routed else config.intermediate_size
        more = shape.num_experts + shared_gates if routed else 0
        down = linear(hidden, width) if width else None
        return Mlp(linear(2 * width + more, hidden), down, width, shape.num_experts if routed else 0)

    embedding = _normal((shape.vocab, hidden), dtype, generator)
    layers = [Layer(norm(hidden), attention(), norm(hidden), mlp(number)) for number in range(shape.layers)]
    tied = getattr(config, "tie_word_embeddings", False)
    head = Linear(embedding) if tied else linear(shape.vocab, hidden, getattr(config, "lm_head_bias", False))
    return Decoder(shape, embedding, layers, norm(hidden), head)


def _normal(size: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.empty(size, dtype=dtype, device=generator.device).normal_(0, SCALE, generator=generator)
