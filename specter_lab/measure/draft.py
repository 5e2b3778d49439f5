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
from torch import Generator
from transformers import PreTrainedModel

from specter_lab.errors import UserError
from specter_lab.measure.capture import TOKEN_BUDGET, build_trace, check_context, join
from specter_lab.measure.prefix import prefill, read
from specter_lab.measure.prompts import TokenizedRequests
from specter_lab.measure.sampling import GREEDY, accepted_length
from specter_lab.measure.speculate import check_depth, check_pair, propose
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
        UserError: draft and target do not fit each other, a depth below 1 or a prefix below 2, a request is shorter than
            the prefix, prefix and window exceed the context, or a router gave NaN.
    """
    check_pair(target, draft)
    check_depth(depth)
    prefixes = cut_to_prefix(tokens, prefix_tokens)
    check_context(target, prefixes, new_tokens=depth)
    windows, draft_pieces, target_pieces, accepted = [], [], [], []
    generator = Generator(target.device)  # greedy: nothing depends on what it draws
    for ids in torch.stack(prefixes.ids).split(max(1, token_budget // prefix_tokens)):  # [B, P]
        with torch.inference_mode():
            ids = ids.to(target.device)
            prefix = prefill(target, ids[:, :-1])
            window, _, draft_routing = propose(draft, copy.deepcopy(prefix), ids[:, -1:], depth, GREEDY, generator)
            logits, target_routing = read(target, prefix, window[:, :-1])  # [B, K, V]
            accepted.append(accepted_length(window[:, 1:] == logits.argmax(dim=-1)).cpu())
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


def cut_to_prefix(tokens: TokenizedRequests, prefix_tokens: int) -> TokenizedRequests:
    """The first `prefix_tokens` tokens of every request; raises UserError when one is shorter, or all would be."""
    if prefix_tokens < 2:
        raise UserError(
            f"a prefix of {prefix_tokens} is too short: it needs 2 tokens, one to read and one to go on from"
        )
    for request, ids in zip(tokens.requests, tokens.ids):
        if len(ids) < prefix_tokens:
            raise UserError(f"prompt '{request.id}' has {len(ids)} tokens, the prefix needs {prefix_tokens}: "
                            f"keep longer prompts (TokenizedRequests.at_least) or shorten the prefix")  # fmt: skip
    return TokenizedRequests(tokens.requests, tuple(ids[:prefix_tokens] for ids in tokens.ids))
