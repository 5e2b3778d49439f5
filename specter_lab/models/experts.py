"""Routed-expert weights as values: read them from a model, and build a model that uses others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specter_lab.errors import UserError
from specter_lab.models.adapters import MoELayer, adapter_for


@dataclass(frozen=True)
class ExpertBank:
    """All routed experts of one MoE layer: the only weights a quantiser accepts."""

    layer: int  # decoder layer
    gate: Tensor  # [E, I, H]
    up: Tensor  # [E, I, H]
    down: Tensor  # [E, H, I]

    @property
    def num_experts(self) -> int:
        return self.gate.shape[0]

    @property
    def num_weights(self) -> int:
        return self.gate.numel() + self.up.numel() + self.down.numel()


def read_bank(layer: MoELayer) -> ExpertBank:
    """The experts of one layer, as views of the model's own tensors (nothing is copied)."""
    gate, up = layer.experts.gate_up_proj.detach().chunk(2, dim=1)  # [E, 2I, H] -> two of [E, I, H]
    return ExpertBank(layer.index, gate, up, layer.experts.down_proj.detach())


def read_banks(model: PreTrainedModel) -> list[ExpertBank]:
    """The experts of every MoE layer, in layer order."""
    return [read_bank(layer) for layer in adapter_for(model.config).moe_layers(model)]


def with_experts(model: PreTrainedModel, banks: Sequence[ExpertBank]) -> PreTrainedModel:
    """A second model that computes with `banks` and shares every other tensor with `model` (Specter, section SIC).

    Aliasing is by construction: modules are copied, parameters and buffers are not.

    Raises:
        ValueError: `banks` are not exactly the model's MoE layers, or a shape differs.
    """
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    draft = copy.deepcopy(model, memo=dict(shared))
    layers = adapter_for(model.config).moe_layers(draft)
    if [layer.index for layer in layers] != [bank.layer for bank in banks]:
        raise ValueError(f"banks for layers {[b.layer for b in banks]} do not fit layers {[l.index for l in layers]}")
    for layer, bank in zip(layers, banks):
        fused = torch.cat((bank.gate, bank.up), dim=1)  # [E, 2I, H]
        for name, value in (("gate_up_proj", fused), ("down_proj", bank.down)):
            old = getattr(layer.experts, name)
            if old.shape != value.shape:
                raise ValueError(f"layer {bank.layer} {name}: {tuple(value.shape)} given, {tuple(old.shape)} needed")
            setattr(layer.experts, name, nn.Parameter(value.to(old), requires_grad=False))
    return draft


def with_top_k(model: PreTrainedModel, top_k: int) -> PreTrainedModel:
    """A second model whose tokens use fewer experts; it shares every tensor with `model` (SS-MoE's draft).

    Raises:
        UserError: `top_k` is not between 1 and the model's, or the architecture's router has a fixed number.
    """
    most = model.config.num_experts_per_tok
    if not 1 <= top_k <= most:
        raise UserError(f"{top_k} experts per token were asked for, the model uses {most}: choose 1 to {most}")
    if model.config.model_type == "phimoe" and top_k != most:
        raise UserError(f"Phi's sparsemixer router picks {most} experts by construction: it cannot draft with {top_k}")
    fewer = copy.deepcopy(model, memo={id(t): t for t in (*model.parameters(), *model.buffers())})
    fewer.config.num_experts_per_tok = top_k
    for layer in adapter_for(fewer.config).moe_layers(fewer):
        layer.router.top_k = top_k
    return fewer
