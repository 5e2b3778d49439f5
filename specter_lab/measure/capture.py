"""Routing capture: one model reads given tokens, and every MoE layer's choices are kept (teacher-forced protocol).

Requests of similar length are padded on the right to one batch. Attention is causal, so no token sees the padding,
and padded positions are dropped before anything is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel

from specter_lab.errors import UserError
from specter_lab.measure.prompts import TokenizedRequests
from specter_lab.measure.trace import PREFILL, Origin, Trace, index_dtype
from specter_lab.models.adapters import adapter_for
from specter_lab.models.routing import Routing, observe_routing

TOKEN_BUDGET = 1024  # padded tokens per forward pass: the fastest of 256, 512, ... 4096 on one CPU core
Output = TypeVar("Output")


@dataclass(frozen=True)
class ForwardRouting:
    """Routing of N chosen rows of one forward pass, in every MoE layer."""

    indices: Tensor  # [N, L, k] int32, experts used
    weights: Tensor  # [N, L, k] float32, factors as used (after softmax)
    scores: Tensor  # [N, L, k] float32, router logits of the experts used (before softmax)
    logits: Tensor | None  # [N, L, E] float32, all router logits


def capture(
    model: PreTrainedModel,
    tokens: TokenizedRequests,
    origin: Origin,
    *,
    keep_logits: bool = False,
    token_budget: int = TOKEN_BUDGET,
) -> Trace:
    """Routing of every token of every request, all in the prefill phase; rows ordered by request, then position.

    Args:
        model: a causal language model with an adapter, in evaluation mode.
        tokens: the requests; each needs at least one token.
        origin: what the trace says about where it comes from.
        keep_logits: keep all E router logits per token and layer, not only those of the experts used.
        token_budget: padded tokens per forward pass (a longer request gets a pass of its own).

    Raises:
        UserError: a request is longer than the model's context, or a router produced NaN.
    """
    check_context(model, tokens, new_tokens=0)
    lengths = np.array([len(ids) for ids in tokens.ids])  # [R]
    first_row = np.concatenate(([0], np.cumsum(lengths)))  # [R + 1]
    pieces, rows = [], []
    for batch in padded_batches(tokens, token_budget):
        ids = batch.ids.to(model.device)
        with torch.inference_mode():
            _, routing = forward_with_routing(
                model, lambda: model.model(input_ids=ids, use_cache=False), batch.real, keep_logits
            )
        pieces.append(routing)
        rows.append(batch.rows)
    trace_order = np.argsort(np.concatenate(rows))
    return build_trace(
        model, origin, "teacher-forced", tokens, join(pieces, trace_order),
        request_index=np.repeat(np.arange(len(lengths)), lengths),
        position=np.arange(first_row[-1]) - np.repeat(first_row[:-1], lengths),
        token_id=torch.cat(tokens.ids).numpy(),
        phase=PREFILL,
    )  # fmt: skip


def check_context(model: PreTrainedModel, tokens: TokenizedRequests, new_tokens: int) -> None:
    """Raise UserError when a request and `new_tokens` more do not fit the model's context."""
    check_positions(model.config, tokens, new_tokens)


def check_positions(config: PretrainedConfig, tokens: TokenizedRequests, new_tokens: int) -> None:
    """`check_context` for a model that is not loaded yet."""
    limit = config.max_position_embeddings
    for request, ids in zip(tokens.requests, tokens.ids):
        if len(ids) + new_tokens > limit:
            raise UserError(f"prompt '{request.id}' needs {len(ids) + new_tokens} positions, the model has {limit}: cut "
                            f"prompts to {limit - new_tokens} tokens or less (--max-tokens, in Python max_tokens)")  # fmt: skip


@dataclass(frozen=True)
class PaddedBatch:
    """Requests of similar length, padded on the right."""

    ids: Tensor  # [B, S]
    real: Tensor  # [N] which of the B * S tokens are not padding
    rows: np.ndarray  # [N] where they stand among all tokens, ordered by request, then position


def padded_batches(tokens: TokenizedRequests, token_budget: int = TOKEN_BUDGET) -> Iterator[PaddedBatch]:
    """All requests in batches whose padded size stays within `token_budget` tokens, shortest first."""
    lengths = np.array([len(ids) for ids in tokens.ids])  # [R]
    first_row = np.concatenate(([0], np.cumsum(lengths)))  # [R + 1]
    for batch in length_batches(lengths, token_budget):
        padded = pad_sequence([tokens.ids[r] for r in batch], batch_first=True)  # [B, S]
        real = np.arange(padded.shape[1]) < lengths[batch, None]  # [B, S], False on padding
        rows = (first_row[batch, None] + np.arange(padded.shape[1]))[real]
        yield PaddedBatch(padded, torch.from_numpy(real.ravel().nonzero()[0]), rows)


def length_batches(lengths: np.ndarray, token_budget: int) -> list[np.ndarray]:
    """Request numbers, shortest first, cut into batches whose padded size stays within `token_budget` tokens."""
    batches: list[list[int]] = []
    for request in np.argsort(lengths, kind="stable"):
        if not batches or (len(batches[-1]) + 1) * lengths[request] > token_budget:
            batches.append([])
        batches[-1].append(int(request))
    return [np.array(batch) for batch in batches]


def forward_with_routing(
    model: PreTrainedModel, forward: Callable[[], Output], rows: Tensor, keep_logits: bool = False
) -> tuple[Output, ForwardRouting]:
    """Run `forward`, one forward pass of `model`, and keep the routing of `rows` [N] of its flattened [B * S] tokens.

    Raises:
        UserError: a router produced NaN; the message names the decoder layer.
        RuntimeError: not every MoE layer reported exactly once.
    """
    expected = [layer.index for layer in adapter_for(model.config).moe_layers(model)]
    rows = rows.to(model.device)
    reported: list[int] = []
    kept: list[tuple[Tensor, ...]] = []
    has_nan: list[Tensor] = []

    def keep(routing: Routing) -> None:
        logits, indices = routing.logits[rows].float(), routing.indices[rows]  # [N, E], [N, k]
        layer = (indices.int(), routing.weights[rows].float(), logits.gather(1, indices))
        reported.append(routing.layer)
        kept.append((*layer, logits) if keep_logits else layer)
        has_nan.append(logits.isnan().any())

    with observe_routing(model, keep):
        output = forward()
    if reported != expected:
        raise RuntimeError(f"routing was reported for layers {reported}, the MoE layers are {expected}")
    if torch.stack(has_nan).any():
        layer = expected[torch.stack(has_nan).int().argmax()]
        raise UserError(f"the router of decoder layer {layer} produced NaN: the weights are damaged or overflow in "
                        f"{model.dtype}; load them again, in float32 or bfloat16")  # fmt: skip
    stacked = [torch.stack(tensors, dim=1) for tensors in zip(*kept)]  # each [N, L, k], all logits [N, L, E]
    return output, ForwardRouting(*stacked, *(() if keep_logits else (None,)))


def join(pieces: Sequence[ForwardRouting], order: np.ndarray) -> ForwardRouting:
    """All rows of `pieces`, one after the other, then taken in `order` [N]; on the CPU."""
    order_tensor = torch.from_numpy(order)

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(piece, name).cpu() for piece in pieces])[order_tensor]

    logits = None if pieces[0].logits is None else joined("logits")
    return ForwardRouting(joined("indices"), joined("weights"), joined("scores"), logits)


def build_trace(
    model: PreTrainedModel,
    origin: Origin,
    protocol: str,
    tokens: TokenizedRequests,
    routing: ForwardRouting,
    *,
    request_index: np.ndarray,
    position: np.ndarray,
    token_id: np.ndarray,
    phase: int,
) -> Trace:
    """The trace of `routing` (on the CPU), whose N rows have the given request, position and token [N]."""
    adapter = adapter_for(model.config)
    num_experts = adapter.num_experts(model.config)
    return Trace(
        origin=origin,
        protocol=protocol,
        num_experts=num_experts,
        layers=tuple(layer.index for layer in adapter.moe_layers(model)),
        request_ids=tuple(request.id for request in tokens.requests),
        request_index=request_index.astype(np.int32),
        position=position.astype(np.int32),
        phase=np.full(len(token_id), phase, dtype=np.uint8),
        token_id=token_id.astype(np.int32),
        indices=routing.indices.numpy().astype(index_dtype(num_experts)),
        weights=routing.weights.numpy(),
        scores=routing.scores.numpy(),
        logits=None if routing.logits is None else routing.logits.numpy(),
    )
