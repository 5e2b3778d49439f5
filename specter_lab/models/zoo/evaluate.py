"""What a zoo model's card states: held-out loss per domain and how evenly its experts are used."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specter_lab.models.adapters import adapter_for
from specter_lab.models.routing import Routing, observe_routing


@torch.no_grad()
def held_out(model: PreTrainedModel, streams: dict[str, Tensor], *, seq_len: int = 512) -> tuple[dict, Tensor]:
    """Loss per domain and expert load over all domains.

    Args:
        model: in evaluation mode.
        streams: domain -> token ids [N]; cut into whole sequences of `seq_len`.

    Returns:
        ({domain: nats per token}, shares [L, E]: share of the layer's token-slots divided by the fair share 1/E).
    """
    adapter = adapter_for(model.config)
    layers = [layer.index for layer in adapter.moe_layers(model)]
    num_experts = adapter.num_experts(model.config)
    counts = torch.zeros(len(layers), num_experts, device=model.device)

    def count(routing: Routing) -> None:
        counts[layers.index(routing.layer)] += torch.bincount(routing.indices.flatten(), minlength=num_experts)

    losses = {}
    for domain, stream in streams.items():
        ids = stream[: len(stream) // seq_len * seq_len].view(-1, seq_len).to(model.device).long()  # [N, T]
        total = 0.0
        with observe_routing(model, count):
            for batch in ids.split(32):
                logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
                total += F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
        losses[domain] = total / (ids.shape[0] * (seq_len - 1))
    shares = counts / counts.sum(-1, keepdim=True) * num_experts  # [L, E], 1.0 = fair
    return losses, shares.cpu()
