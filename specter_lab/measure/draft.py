"""The free-running draft protocol: routing compared as Specter uses it (Specter, sections SIC and PIO).

The target prefills all but the last of P prefix tokens. From a copy of its KV cache the draft continues greedily for
K steps from its own tokens; then the target verifies those K inputs in one pass over its own cache:

    position       P-1   P     P+1   ...  P+K-2
    input          x_0   x_1   x_2   ...  x_(K-1)      x_0: last prefix token; x_1 ...: drafted
    draft predicts x_1   x_2   x_3   ...  x_K
    target accepts x_(i+1) when it predicts it at x_i and accepted all before

Both models route the same K inputs, which is what is compared. In use the window also holds x_K, for the bonus token;
the draft never routes it, so it has no place here. Tokens after an end-of-text token are drafted like any other.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specter_lab.errors import UserError
from specter_lab.measure.capture import (
    TOKEN_BUDGET, ForwardRouting, build_trace, check_context, forward_with_routing, join,
)  # fmt: skip
from specter_lab.measure.prompts import TokenizedRequests
from specter_lab.measure.trace import DECODE, Origin, Trace


@dataclass(frozen=True)
class DraftWindows:
    """One drafted window of K tokens per request, routed by both models."""

    draft: Trace  # [R * K] tokens
    target: Trace  # the same tokens
    accepted: np.ndarray  # [R] drafted tokens the target accepts, 0..K


def free_running_draft(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokens: TokenizedRequests,
    target_origin: Origin,
    draft_origin: Origin,
    *,
    prefix_tokens: int = 32,
    depth: int = 16,
    token_budget: int = TOKEN_BUDGET,
) -> DraftWindows:
    """Draft and verify one window per request.

    Args:
        target: the full-precision model.
        draft: `models.experts.with_experts(target, quantised banks)`, or any model with the same cache layout.
        tokens: requests of at least `prefix_tokens` tokens; the rest of each is not used.
        target_origin, draft_origin: what the two traces say about where they come from.
        prefix_tokens: P, at least 2.
        depth: K, at least 1.
        token_budget: prefix tokens per batch of requests.

    Raises:
        UserError: a request is shorter than the prefix, prefix and window exceed the context, or a router gave NaN.
    """
    if prefix_tokens < 2 or depth < 1:
        raise ValueError(f"prefix_tokens {prefix_tokens} must be at least 2 and depth {depth} at least 1")
    prefixes = cut_to_prefix(tokens, prefix_tokens)
    check_context(target, prefixes, new_tokens=depth)
    windows, draft_pieces, target_pieces, accepted = [], [], [], []
    for ids in torch.stack(prefixes.ids).split(max(1, token_budget // prefix_tokens)):  # [B, P]
        with torch.inference_mode():
            ids = ids.to(target.device)
            shared = prefill(target, ids[:, :-1])
            window, draft_routing = propose(draft, copy.deepcopy(shared), ids[:, -1:], depth)
            logits, target_routing = verify(target, shared, window[:, :-1])
            accepted.append(accepted_length(window[:, 1:], logits.argmax(dim=-1)).cpu())
        windows.append(window[:, :-1].cpu())
        draft_pieces.append(draft_routing)
        target_pieces.append(target_routing)
    inputs = torch.cat(windows)  # [R, K]
    rows = dict(
        request_index=np.repeat(np.arange(len(inputs)), depth),
        position=np.tile(np.arange(prefix_tokens - 1, prefix_tokens - 1 + depth), len(inputs)),
        token_id=inputs.flatten().numpy(),
        phase=DECODE,
    )
    order = np.arange(inputs.numel())
    return DraftWindows(
        build_trace(draft, draft_origin, "free-running-draft", prefixes, join(draft_pieces, order), **rows),
        build_trace(target, target_origin, "verification", prefixes, join(target_pieces, order), **rows),
        torch.cat(accepted).numpy(),
    )


def prefill(target: PreTrainedModel, ids: Tensor) -> DynamicCache:
    """The target's KV cache after reading ids [B, S]."""
    cache = DynamicCache(config=target.config)
    target.model(input_ids=ids, cache=cache, use_cache=True)
    return cache


def propose(
    draft: PreTrainedModel, cache: DynamicCache, last_token: Tensor, depth: int
) -> tuple[Tensor, ForwardRouting]:
    """Continue greedily for `depth` steps; `cache` grows and is the draft's own to spoil.

    Args:
        last_token: [B, 1], the first input.

    Returns:
        Tokens [B, K + 1], the first of them `last_token`, and the draft's routing of the first K, rows [B * K].
    """
    window, steps = [last_token], []
    every_request = torch.arange(len(last_token))
    for _ in range(depth):
        output, routing = forward_with_routing(
            draft, lambda: draft(input_ids=window[-1], cache=cache, use_cache=True), every_request
        )
        window.append(output.logits[:, -1:].argmax(dim=-1))  # [B, 1]
        steps.append(routing)
    request_major = np.arange(depth * len(last_token)).reshape(depth, -1).T.ravel()  # [K, B] rows -> [B, K] rows
    return torch.cat(window, dim=1), join(steps, request_major)


def verify(target: PreTrainedModel, cache: DynamicCache, inputs: Tensor) -> tuple[Tensor, ForwardRouting]:
    """One pass of the target over inputs [B, K] after `cache`, which grows: logits [B, K, V], routing rows [B * K]."""
    output, routing = forward_with_routing(
        target, lambda: target(input_ids=inputs, cache=cache, use_cache=True), torch.arange(inputs.numel())
    )
    return output.logits, routing


def accepted_length(drafted: Tensor, predicted: Tensor) -> Tensor:
    """How many drafted tokens [B, K] agree with the target's predictions [B, K] before the first that does not: [B]."""
    return (drafted == predicted).long().cumprod(dim=1).sum(dim=1)


def cut_to_prefix(tokens: TokenizedRequests, prefix_tokens: int) -> TokenizedRequests:
    """The first `prefix_tokens` tokens of every request; raises UserError when one is shorter."""
    for request, ids in zip(tokens.requests, tokens.ids):
        if len(ids) < prefix_tokens:
            raise UserError(f"prompt '{request.id}' has {len(ids)} tokens, the prefix needs {prefix_tokens}: "
                            f"keep longer prompts (TokenizedRequests.at_least) or shorten the prefix")  # fmt: skip
    return TokenizedRequests(tokens.requests, tuple(ids[:prefix_tokens] for ids in tokens.ids))
