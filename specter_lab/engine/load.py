"""From a checkpoint to the engine's tensors, without a transformers model in between: one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig

from specter_lab.engine.decoder import Attention, Decoder, Layer, Linear, Mlp, Norm
from specter_lab.engine.shape import Shape, shape_of
from specter_lab.errors import UserError
from specter_lab.models.adapters import adapter_for

Tensors = Iterator[tuple[str, Tensor]]  # checkpoint key, weight
# (MoE layer, expert, 0: gate, 1: up, 2: down) and its weight
OnExpert = Callable[[int, int, int, Tensor], None]


def checkpoint_tensors(folder: Path) -> Tensors:
    """All weights of a checkpoint folder, in the files' order.

    Raises:
        UserError: there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"no .safetensors files in {folder}: this folder is not a checkpoint")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)


def read_decoder(
    config: PretrainedConfig, tensors: Tensors, on_expert: OnExpert, *, device: str, dtype: torch.dtype
) -> Decoder:
    """Everything but routed experts as a `Decoder` on `device`; every routed expert's weights go to `on_expert`.

    Raises:
        UserError: a weight is missing, or one is left over that the engine has no place for.
    """
    shape, adapter = shape_of(config), adapter_for(config)
    experts = {
        adapter.expert_key(layer, expert, projection) + ".weight": (number, expert, part)
        for number, layer in enumerate(shape.moe_layers)
        for expert in range(shape.num_experts)
        for part, projection in enumerate(("gate", "up", "down"))
    }
    dense: dict[str, Tensor] = {}
    for name, weight in tensors:
        if (where := experts.pop(name, None)) is not None:
            on_expert(*where, weight)
        else:
            dense[name] = weight.to(device, dtype)
    if experts:
        raise UserError(f"{len(experts)} weights of routed experts are missing, e.g. '{next(iter(experts))}': the "
                        f"checkpoint is not complete")  # fmt: skip
    decoder = _assemble(shape, adapter.checkpoint_block, dense)
    if dense:
        raise UserError(f"the engine has no place for '{next(iter(dense))}': this checkpoint is of another architecture "
                        f"than its config.json says")  # fmt: skip
    return decoder


def _assemble(shape: Shape, block: str, dense: dict[str, Tensor]) -> Decoder:
    def take(name: str, required: bool = True) -> Tensor | None:
        if required and name not in dense:
            raise UserError(f"the checkpoint has no '{name}': it is not complete")
        return dense.pop(name, None)

    def linear(name: str) -> Linear:
        return Linear(take(f"{name}.weight"), take(f"{name}.bias", required=False))

    def norm(name: str) -> Norm:
        return Norm(take(f"{name}.weight"), take(f"{name}.bias", required=False))

    def mlp(name: str, *more: Linear) -> Mlp:
        gate, up, down = (linear(f"{name}.{part}_proj") for part in ("gate", "up", "down"))
        width, routed = len(gate.weight), len(more[0].weight) if more else 0
        return Mlp(joined(by_turns(gate, up), *more), down, width, routed)

    def attention(name: str) -> Attention:
        q, o = linear(f"{name}.q_proj"), linear(f"{name}.o_proj")
        if not shape.latent:
            return Attention(joined(q, linear(f"{name}.k_proj"), linear(f"{name}.v_proj")), o)
        return Attention(joined(q, linear(f"{name}.kv_a_proj_with_mqa")), o, norm(f"{name}.kv_a_layernorm"),
                         linear(f"{name}.kv_b_proj"))  # fmt: skip

    def layer(number: int) -> Layer:
        name = f"model.layers.{number}"
        norms = norm(f"{name}.input_layernorm"), norm(f"{name}.post_attention_layernorm")
        weights = attention(f"{name}.self_attn")
        if number not in shape.moe_layers:
            return Layer(norms[0], weights, norms[1], mlp(f"{name}.mlp"))
        router = linear(f"{name}.{block}.gate")
        shared = {"qwen2_moe": "shared_expert", "deepseek_v2": "shared_experts"}.get(shape.model_type)
        gate = [linear(f"{name}.mlp.shared_expert_gate")] if shape.model_type == "qwen2_moe" else []
        after = mlp(f"{name}.mlp.{shared}", router, *gate) if shared else Mlp(router, None, 0, shape.num_experts)
        return Layer(norms[0], weights, norms[1], after)

    embedding = take("model.embed_tokens.weight")
    layers = [layer(number) for number in range(shape.layers)]
    head = linear("lm_head") if "lm_head.weight" in dense else Linear(embedding)
    return Decoder(shape, embedding, layers, norm("model.norm"), head)


def joined(*parts: Linear) -> Linear:
    """Layers that meet the same input as one, rows one after the other."""
    weight = torch.cat([part.weight for part in parts])
    if all(part.bias is None for part in parts):
        return Linear(weight)
    return Linear(weight, torch.cat([_bias(part) for part in parts]))


def by_turns(gate: Linear, up: Linear) -> Linear:
    """Rows gate 0, up 0, gate 1, up 1, ...: a tile of a kernel then holds both factors of its products."""
    weight = torch.stack([gate.weight, up.weight], dim=1).flatten(0, 1)
    if gate.bias is None and up.bias is None:
        return Linear(weight)
    return Linear(weight, torch.stack([_bias(gate), _bias(up)], dim=1).flatten())


def _bias(part: Linear) -> Tensor:
    return part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias
