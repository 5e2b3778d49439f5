"""Memory of the shared prefix: keys and values that grow and shrink without being copied for every token.

A decoder reads the whole cache in every pass, but there is no need to write it again: tokens go into room behind those
that are there. Latent attention (MLA) keeps less than keys and values and makes them from it; here it makes them once
per token, not once per pass. Neither changes what a model computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

ROOM = 40  # columns of room that a copy gets: a window of 32 drafted tokens and some


class RoomyLayer(DynamicLayer):
    """Keys and values [B, heads, S, dim] of one layer, with room behind them."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append T tokens: [B, heads, T, dim] each. Returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = append(self.keys, key_states), append(self.values, value_states)
        return self.keys, self.values


class ExpandedLayer(RoomyLayer):
    """The same for latent attention: holds the keys and values made from the latents, which it does not keep."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Returns the latents of the new tokens as they came, for `expanding_once`."""
        return key_states, value_states

    def expand(self, expand_kv, *latents: Tensor) -> tuple[Tensor, Tensor]:
        """Append what the model makes of new latents. Returns all keys and values."""
        return super().update(*expand_kv(*latents))


def kv_layout(config: PretrainedConfig) -> dict[str, int | None]:
    """What the shape of a model's keys and values follows from, by the config's names."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    latent = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": head_dim,
    } | {name: getattr(config, name, None) for name in latent}


def empty_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache whose layers have room; layers with a sliding window stay as they are."""
    cache = DynamicCache(config=model.config)
    full = ExpandedLayer if _latent_attentions(model) else RoomyLayer
    cache.layers = [full() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@contextmanager
def expanding_once(model: PreTrainedModel, cache: DynamicCache) -> Iterator[None]:
    """Inside, `model` expands the latents of new tokens only, if `cache` keeps the expanded ones."""
    attentions = [a for a in _latent_attentions(model) if isinstance(cache.layers[a.layer_idx], ExpandedLayer)]
    for attention in attentions:
        attention.expand_kv = partial(cache.layers[attention.layer_idx].expand, attention.expand_kv)
    try:
        yield
    finally:
        for attention in attentions:
            del attention.expand_kv  # the method of the class is back


def append(held: Tensor, new: Tensor) -> Tensor:
    """[B, heads, S, dim] and [B, heads, T, dim] behind it: in place where there is room."""
    batch, heads, count, dim = new.shape
    size = held.shape[2] if held.numel() else 0
    end = size + count
    if size and end <= _capacity(held):
        whole = held.as_strided((batch, heads, end, dim), held.stride())
    else:
        whole = new.new_empty(batch, heads, end + ROOM, dim)
        if size:
            whole[:, :, :size] = held
    whole[:, :, size:end] = new
    return whole[:, :, :end]


def take_columns(held: Tensor, columns: Tensor) -> Tensor:
    """Each row's own columns [B, W]: [B, heads, S, dim] -> [B, heads, W, dim], a copy with room behind it."""
    batch, heads, size, dim = held.shape
    with_room = torch.nn.functional.pad(columns, (0, ROOM))  # what lies in the room does not matter
    first = torch.arange(batch * heads, device=held.device).view(batch, heads, 1) * size
    taken = held.reshape(-1, dim).index_select(0, (first + with_room[:, None]).flatten())
    return taken.view(batch, heads, -1, dim)[:, :, : columns.shape[1]]


def _capacity(held: Tensor) -> int:
    """Columns that the memory behind [B, heads, S, dim] has for each head; none where it is not laid out like `append`."""
    batch, heads, _, dim = held.shape
    of_row, of_head, of_column, of_value = held.stride()
    laid_out = (of_column, of_value) == (dim, 1) and of_row == heads * of_head and held.storage_offset() == 0
    fits = held.untyped_storage().nbytes() >= batch * of_row * held.element_size()
    return of_head // dim if laid_out and fits else 0


def _latent_attentions(model: PreTrainedModel) -> list[nn.Module]:
    return [layer.self_attn for layer in model.model.layers if hasattr(layer.self_attn, "expand_kv")]
