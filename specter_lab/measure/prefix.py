"""The shared prefix: the only decoding state, holding verified tokens' KV and nothing else (Specter, section SIC).

Requests are decoded side by side and accept different numbers of tokens, so their prefixes have different lengths.
Rows are aligned on the right:

    columns      0    1    2    3    4          the last column is every row's latest token
    row 0        a    b    c    d    e          length 5
    row 1        -    -    f    g    h          length 3; "-" is masked

The draft works on a copy, which is thrown away; after verification `forget` drops the rejected tokens of each row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor
from transformers import DynamicCache, PreTrainedModel

from specter_lab.errors import UserError
from specter_lab.measure.capture import ForwardRouting, forward_with_routing, join
from specter_lab.measure.kv_memory import empty_cache, expanding_once, take_columns
from specter_lab.measure.sampling import next_token


@dataclass
class Prefix:
    """KV of B requests; grows by `read` and `write`, shrinks by `forget`. `copy.deepcopy` gives an independent one."""

    cache: DynamicCache  # per layer keys and values [B, heads, S, dim]
    lengths: Tensor  # [B] tokens held; S is the largest

    def forget(self, dropped: Tensor) -> None:
        """Drop the last `dropped` [B] tokens of every row and align the rows on the right again."""
        end = self.cache.get_seq_length() - dropped  # [B] first column to go
        lengths = self.lengths - dropped
        width = int(lengths.max())
        self.take(end[:, None] - width + torch.arange(width, device=end.device), lengths)

    def take(self, columns: Tensor, lengths: Tensor) -> None:
        """Hold these columns [B, S] alone, the last `lengths` [B] of each row; what stands before them is masked."""
        self.lengths = lengths
        for layer in self.cache.layers:
            layer.keys, layer.values = (take_columns(held, columns.clamp_min(0)) for held in (layer.keys, layer.values))

    def rows(self, chosen: Tensor) -> Prefix:
        """An independent prefix of some rows [N], each as often as it is named."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        cache.batch_select_indices(chosen)  # makes new tensors
        return Prefix(cache, self.lengths[chosen])

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only some requests: bool [B]."""
        if rows.all():
            return
        self.cache.batch_select_indices(rows)
        self.lengths = self.lengths[rows]


def prefill(target: PreTrainedModel, ids: Tensor) -> Prefix:
    """The target's prefix after reading ids [B, S]; rows that are equal are read once."""
    different, row = ids.unique(dim=0, return_inverse=True)
    if len(different) < len(ids):
        return prefill(target, different).rows(row)
    cache = empty_cache(target)
    with expanding_once(target, cache):
        target.model(input_ids=ids, cache=cache, use_cache=True)
    return Prefix(cache, torch.full((len(ids),), ids.shape[1], device=ids.device))


def read(model: PreTrainedModel, prefix: Prefix, inputs: Tensor) -> tuple[Tensor, ForwardRouting]:
    """One pass of `model` over inputs [B, T] after `prefix`, which grows: logits [B, T, V], routing rows [B * T].

    Raises:
        UserError: a router or the output produced NaN.
    """
    batch, new = inputs.shape
    first_column = prefix.cache.get_seq_length() - prefix.lengths  # [B]
    columns = torch.arange(prefix.cache.get_seq_length() + new, device=inputs.device)  # [S + T]
    positions = prefix.lengths[:, None] + torch.arange(new, device=inputs.device)
    seen = columns >= first_column[:, None]
    logits, routing = read_seeing(model, prefix, inputs, seen, positions, torch.arange(batch * new))
    prefix.lengths = prefix.lengths + new
    return logits.unflatten(0, (batch, new)), routing


def read_seeing(
    model: PreTrainedModel, prefix: Prefix, inputs: Tensor, seen: Tensor, positions: Tensor, rows: Tensor
) -> tuple[Tensor, ForwardRouting]:
    """One pass over inputs [B, T] at `positions` [B, T], which leaves their KV behind the prefix and its lengths alone.

    Args:
        seen: columns that a row sees as far as they are not later ones, bool [B, S + T]; or what every input sees,
            as the float [B, 1, T, S + T] that is added to attention scores.
        rows: [N] which of the B * T inputs are not padding.

    Returns:
        Logits [N, V] and routing of these rows.

    Raises:
        UserError: a router or the output produced NaN.
    """
    with expanding_once(model, prefix.cache):
        output, routing = forward_with_routing(
            model,
            lambda: model(
                input_ids=inputs, attention_mask=seen, position_ids=positions, cache=prefix.cache, use_cache=True
            ),
            rows,
        )
    logits = output.logits.flatten(0, 1)[rows.to(inputs.device)]
    if logits.isnan().any():
        raise UserError(f"the output of the {model.config.model_type} model is NaN: its weights are damaged or "
                        f"overflow in {model.dtype}; load them again, in float32 or bfloat16")  # fmt: skip
    return logits, routing


def write(
    model: PreTrainedModel, prefix: Prefix, last: Tensor, count: int, temperature: float, generator: Generator
) -> Iterator[tuple[Tensor, Tensor, ForwardRouting]]:
    """Decode `count` tokens after `last` [B, 1], one pass each; `prefix` grows by `last` and all but the final one.

    Yields:
        Token [B, 1], the logits it was drawn from [B, V], and the routing of the pass, rows [B].

    Raises:
        UserError: as `read`.
    """
    for _ in range(count):
        logits, routing = read(model, prefix, last)  # [B, 1, V]
        last = next_token(logits[:, -1], temperature, generator)
        yield last, logits[:, -1], routing


def join_steps(steps: Sequence[ForwardRouting]) -> ForwardRouting:
    """Routing of N passes, rows [B] each, as rows [B * N]: all of the first request, then all of the second."""
    batch = len(steps[0].indices)
    return join(steps, np.arange(len(steps) * batch).reshape(-1, batch).T.ravel())
