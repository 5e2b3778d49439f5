"""The one-layer-ahead predictor: the next layer's router applied to this layer's input (MoE-SpeQ, comparison row).

Offloading systems without a draft guess the experts of layer l+1 while layer l computes, by feeding l's MoE input to
l+1's router. It needs no second model and no training, and it is what the draft's routing is measured against.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specter_lab.measure.capture import TOKEN_BUDGET, length_batches
from specter_lab.measure.prompts import TokenizedRequests
from specter_lab.models.adapters import adapter_for
from specter_lab.models.routing import Routing, observe_routing


def lookahead_overlap(model: PreTrainedModel, tokens: TokenizedRequests) -> np.ndarray:
    """Share of the k experts of MoE layers 2..L that the predictor names.

    Returns:
        [T, L-1] float32 overlaps; rows ordered by request, then position, as in `capture.capture`.
    """
    layers = adapter_for(model.config).moe_layers(model)
    lengths = np.array([len(ids) for ids in tokens.ids])  # [R]
    first_row = np.concatenate(([0], np.cumsum(lengths)))
    overlaps = np.empty((first_row[-1], len(layers) - 1), np.float32)
    for batch in length_batches(lengths, TOKEN_BUDGET):
        padded = pad_sequence([tokens.ids[r] for r in batch], batch_first=True).to(model.device)  # [B, S]
        seen: list[Routing] = []
        with torch.inference_mode(), observe_routing(model, seen.append):
            model.model(input_ids=padded, use_cache=False)
        with torch.inference_mode():
            pairs = zip(seen, seen[1:], layers[1:])
            matches = [_overlap(after.router(now.hidden)[2], then.indices) for now, then, after in pairs]
        real = np.arange(padded.shape[1]) < lengths[batch, None]  # [B, S]
        rows = (first_row[batch, None] + np.arange(padded.shape[1]))[real]
        overlaps[rows] = torch.stack(matches, dim=1).cpu().numpy()[real.ravel()]
    return overlaps


def _overlap(predicted: Tensor, used: Tensor) -> Tensor:
    """|A and B| / k of two index tensors [T, k]: [T]."""
    return (predicted[:, :, None] == used[:, None, :]).any(dim=1).float().mean(dim=1)
