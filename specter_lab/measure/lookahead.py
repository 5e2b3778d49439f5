"""The one-layer-ahead predictor: the next layer's router applied to this layer's input (MoE-SpeQ, comparison row).

Offloading systems without a draft guess the experts of layer l+1 while layer l computes, by feeding l's MoE input to
l+1's router. It needs no second model and no training, and it is what the draft's routing is measured against.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specter_lab.measure.capture import check_context, padded_batches
from specter_lab.measure.prompts import TokenizedRequests
from specter_lab.models.adapters import adapter_for
from specter_lab.models.routing import Routing, observe_routing


@torch.inference_mode()
def lookahead_overlap(model: PreTrainedModel, tokens: TokenizedRequests) -> np.ndarray:
    """Share of the k experts of MoE layers 2..L that the predictor names.

    Returns:
        [T, L-1] float32 overlaps; rows ordered by request, then position, as in `capture.capture`.

    Raises:
        UserError: a request is longer than the model's context.
    """
    check_context(model, tokens, new_tokens=0)
    layers = adapter_for(model.config).moe_layers(model)
    overlaps = np.empty((tokens.num_tokens, len(layers) - 1), np.float32)
    for batch in padded_batches(tokens):
        seen: list[Routing] = []
        with observe_routing(model, seen.append):
            model.model(input_ids=batch.ids.to(model.device), use_cache=False)
        matches = [
            _overlap(layer.router(before.hidden)[2], now.indices)
            for before, now, layer in zip(seen, seen[1:], layers[1:])
        ]
        overlaps[batch.rows] = torch.stack(matches, dim=1).cpu().numpy()[batch.real]
    return overlaps


def _overlap(predicted: Tensor, used: Tensor) -> Tensor:
    """|A and B| / k of two index tensors [T, k]: [T]."""
    return (predicted[:, :, None] == used[:, None, :]).any(dim=1).float().mean(dim=1)
