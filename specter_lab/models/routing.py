"""Watching the routers: one hook pair per MoE layer, reporting what the experts really received."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from specter_lab.models.adapters import adapter_for


@dataclass(frozen=True)
class Routing:
    """What one MoE layer did with T tokens in one forward pass."""

    layer: int  # decoder layer
    hidden: Tensor  # [T, H] input of the experts
    logits: Tensor  # [T, E] router scores before softmax
    indices: Tensor  # [T, k] experts used, in the order the layer used them
    weights: Tensor  # [T, k] factors the experts' outputs were multiplied with (after softmax)


@contextmanager
def observe_routing(model: PreTrainedModel, on_layer: Callable[[Routing], None]) -> Iterator[None]:
    """Call `on_layer` for every MoE layer of every forward pass inside the block.

    Indices and weights are taken from the *experts'* arguments, so they are the ones used, whatever the router
    returned. Tensors are the model's own: copy what you keep.
    """
    logits_of: dict[int, Tensor] = {}
    handles = []
    for layer in adapter_for(model.config).moe_layers(model):

        def after_router(_module, _args, output, index=layer.index):
            logits_of[index] = output[0]

        def before_experts(_module, args, index=layer.index):
            hidden, indices, weights = args
            on_layer(Routing(index, hidden, logits_of.pop(index), indices, weights))

        handles.append(layer.router.register_forward_hook(after_router))
        handles.append(layer.experts.register_forward_pre_hook(before_experts))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
