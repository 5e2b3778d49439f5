"""Calibration one decoder layer at a time, each fed by the already quantised layers below it.

As in the GPTQ paper: what layer l is fitted to is what it will really get. Only one layer's Hessians and one layer's
inputs exist at a time, and the source model is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from specter_lab.compress.calibration import SEQUENCES_PER_PASS
from specter_lab.compress.gptq import LayerInputs
from specter_lab.compress.grid import CodedBank, dequantize_bank
from specter_lab.models.experts import ExpertBank, read_bank
from specter_lab.models.load import LoadedModel
from specter_lab.models.routing import Routing, observe_routing


def _layer_arguments(model: PreTrainedModel, ids: Tensor) -> list[dict]:
    """Keyword arguments (positions, mask) that each decoder layer gets for sequences like `ids` [1, T]."""
    arguments: list[dict] = []
    handles = [
        layer.register_forward_pre_hook(lambda _module, _args, kwargs: arguments.append(kwargs), with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return arguments


def _run(layer: nn.Module, weights: dict[str, Tensor], hidden: Tensor, arguments: dict) -> Tensor:
    """Output [N, T, H] of a decoder layer that computes with `weights` in place of its own."""
    batches = hidden.split(SEQUENCES_PER_PASS)
    return torch.cat([functional_call(layer, weights, (batch,), arguments) for batch in batches])


def _quantized_weights(coded: CodedBank, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters of a decoder layer that a quantised bank replaces."""
    bank = dequantize_bank(coded)
    fused = torch.cat((bank.gate, bank.up), dim=1)  # [E, 2I, H]
    return {"mlp.experts.gate_up_proj": fused.to(dtype), "mlp.experts.down_proj": bank.down.to(dtype)}


@torch.no_grad()
def quantize_in_order(
    source: LoadedModel, ids: Tensor, quantize_bank: Callable[[ExpertBank, LayerInputs], CodedBank]
) -> Iterator[tuple[CodedBank, Tensor]]:
    """Quantise the MoE layers from the bottom up.

    Args:
        source: the full-precision model; left as it is.
        ids: [N, T] calibration tokens.
        quantize_bank: makes codes from a layer's experts and its calibration inputs.

    Yields:
        The codes of one layer, and tokens [E] that each of its experts got.
    """
    model = source.model
    ids = ids.to(model.device)
    arguments = _layer_arguments(model, ids[:1])
    moe_layers = {layer.index: layer for layer in source.adapter.moe_layers(model)}
    hidden = model.get_input_embeddings()(ids)  # [N, T, H]
    for index, (layer, kwargs) in enumerate(zip(model.model.layers, arguments)):
        weights: dict[str, Tensor] = {}
        if index in moe_layers:
            seen: list[Routing] = []
            with observe_routing(model, seen.append):
                _run(layer, {}, hidden, kwargs)
            inputs = LayerInputs(
                torch.cat([routing.hidden for routing in seen]),
                torch.cat([routing.indices for routing in seen]),
                moe_layers[index].experts.act_fn,
            )
            bank = read_bank(moe_layers[index])
            coded = quantize_bank(bank, inputs)
            yield coded, torch.bincount(inputs.indices.flatten(), minlength=bank.num_experts)
            weights = _quantized_weights(coded, bank.gate.dtype)
            del seen, inputs, coded
        hidden = _run(layer, weights, hidden, kwargs)
