"""Self-speculative decoding, the reference: what Specter's algorithm is, without offloading and without hurry.

One round, for a request whose last committed token is x_0 (its KV is not in the shared prefix yet):

    position       n     n+1   ...  n+K
    input          x_0   x_1   ...  x_K      x_1 ... x_K: drafted from a throw-away copy of the prefix
    draft's q      q_1   q_2   ...           distribution x_i was drawn from
    target's p     p_1   p_2   ...  p_(K+1)  one pass over the K+1 inputs
    committed      x_1 ... x_a, y            a accepted tokens and one of the target's: the correction, or the bonus

The draft proposes x_1 ... x_K, the rule accepts a of them, the prefix forgets the other K - a. Tokens after an end-of-text token are decoded like any other, so that all requests are equally long (Specter measures
128 new tokens whatever they are).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel

from specter_lab.errors import UserError
from specter_lab.measure.capture import ForwardRouting
from specter_lab.measure.kv_memory import kv_layout
from specter_lab.measure.prefix import Prefix, join_steps, prefill, read, write
from specter_lab.measure.sampling import GREEDY, AcceptRule, accept, distribution
from specter_lab.models.adapters import adapter_for


@dataclass(frozen=True)
class Rounds:
    """N verification rounds, in the order they were run."""

    depth: int  # K, drafted tokens per round
    request: np.ndarray  # [N] row of the prompt
    position: np.ndarray  # [N] of the round's first input
    accepted: np.ndarray  # [N] 0..K
    needed: np.ndarray  # [N, L, E] bool, experts the target uses for the K + 1 inputs
    predicted: np.ndarray  # [N, L, E] bool, experts the draft used for its K inputs: what can be prefetched

    def of(self, requests: np.ndarray) -> Rounds:
        """The rounds of some requests, given by row."""
        chosen = np.isin(self.request, requests)
        columns = (self.request, self.position, self.accepted, self.needed, self.predicted)
        return Rounds(self.depth, *(column[chosen] for column in columns))


@dataclass(frozen=True)
class Decoded:
    """New tokens of B requests, and the rounds they took; the last round of a request may have committed more."""

    tokens: Tensor  # [B, N] int64
    rounds: Rounds


@dataclass(frozen=True)
class PlainDecoded:
    """New tokens of B requests from the target alone."""

    tokens: Tensor  # [B, N] int64
    margins: Tensor  # [B, N] float32, logit of the best token minus that of the second best


def speculative_decode(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Tensor,
    *,
    new_tokens: int,
    depth: int,
    temperature: float = GREEDY,
    seed: int = 0,
    rule: AcceptRule = accept,
) -> Decoded:
    """Decode B requests side by side; each one's tokens follow the target's distribution (greedy: equal its choices).

    Args:
        target: the full-precision model.
        draft: the same model with quantised experts (`models.experts.with_experts`), or one with the same KV layout.
        prompts: [B, P] token ids, P at least 2.
        new_tokens: tokens per request.
        depth: K, at least 1.
        temperature: 0 is greedy.
        seed: of everything drawn; what a request draws depends on the requests beside it.
        rule: decides what is accepted; anything but the default gives up exactness.

    Raises:
        UserError: draft and target do not fit each other, depth or new tokens below 1, prompt and new tokens exceed the
            context, or a model produced NaN.
    """
    check_start(target, draft, prompts, new_tokens=new_tokens, depth=depth)
    prompts = prompts.to(target.device)
    generator = Generator(target.device).manual_seed(seed)
    texts: list[list[int]] = [[] for _ in prompts]
    active = torch.arange(len(prompts))
    rounds = []
    with torch.inference_mode():
        prefix, last = prefill(target, prompts[:, :-1]), prompts[:, -1:]
        while len(active):
            position = prefix.lengths
            window, q, predicted = propose(draft, copy.deepcopy(prefix), last, depth, temperature, generator)
            logits, needed = read(target, prefix, window)  # [B, K + 1, V]
            accepted, last = rule(window[:, 1:], q, distribution(logits, temperature), generator)
            prefix.forget(depth - accepted)
            rounds.append(_round(target, active, position, accepted, needed, predicted))
            committed = (part.tolist() for part in (active, window[:, 1:], accepted, last[:, 0]))
            for request, drafted, count, next_token in zip(*committed):
                texts[request] += [*drafted[:count], next_token]
            unfinished = torch.tensor([len(texts[request]) < new_tokens for request in active])
            active, last = active[unfinished], last[unfinished]
            prefix.keep_rows(unfinished)
    return Decoded(torch.tensor([text[:new_tokens] for text in texts]), _joined(depth, rounds))


def plain_decode(
    target: PreTrainedModel, prompts: Tensor, *, new_tokens: int, temperature: float = GREEDY, seed: int = 0
) -> PlainDecoded:
    """Decode prompts [B, P] one token at a time with the target alone; raises as `speculative_decode`."""
    check_new_tokens(new_tokens)
    check_length(target, prompts, new_tokens)
    prompts = prompts.to(target.device)
    generator = Generator(target.device).manual_seed(seed)
    tokens, margins = [], []
    with torch.inference_mode():
        prefix = prefill(target, prompts[:, :-1])
        for token, logits, _ in write(target, prefix, prompts[:, -1:], new_tokens, temperature, generator):
            best, second = logits.float().topk(2).values.T
            margins.append(best - second)
            tokens.append(token)
    return PlainDecoded(torch.cat(tokens, dim=1).cpu(), torch.stack(margins, dim=1).cpu())


def propose(
    draft: PreTrainedModel, prefix: Prefix, last: Tensor, depth: int, temperature: float, generator: Generator
) -> tuple[Tensor, Tensor, ForwardRouting]:
    """Draft `depth` tokens after `last` [B, 1]; `prefix` is the draft's own to spoil.

    Returns:
        Window [B, K + 1] (`last`, then the drafted tokens), the distributions they were drawn from [B, K, V], and the
        draft's routing of its K inputs, rows [B * K].
    """
    tokens, logits, steps = zip(*write(draft, prefix, last, depth, temperature, generator))
    q = distribution(torch.stack(logits, dim=1), temperature)
    return torch.cat([last, *tokens], dim=1), q, join_steps(steps)


def _round(
    target: PreTrainedModel,
    requests: Tensor,
    position: Tensor,
    accepted: Tensor,
    needed: ForwardRouting,
    predicted: ForwardRouting,
) -> tuple[Tensor, ...]:
    """One round of B requests as columns of `Rounds`: [B] three times, and [B, L, E] twice."""
    experts = (experts_of_windows(target, routing, len(requests)) for routing in (needed, predicted))
    return tuple(column.cpu() for column in (requests, position, accepted, *experts))


def _joined(depth: int, rounds: Sequence[tuple[Tensor, ...]]) -> Rounds:
    """All rounds, one after the other."""
    return Rounds(depth, *(torch.cat(column).numpy() for column in zip(*rounds)))


def experts_of_windows(model: PreTrainedModel, routing: ForwardRouting, batch: int) -> Tensor:
    """Which experts each request's window uses in each MoE layer: routing rows [B * T] -> [B, L, E] bool."""
    num_experts = adapter_for(model.config).num_experts(model.config)
    indices = routing.indices.long().unflatten(0, (batch, -1))  # [B, T, L, k]
    experts = indices.transpose(1, 2).flatten(2)  # [B, L, T * k]
    used = torch.zeros(*experts.shape[:2], num_experts, dtype=torch.bool, device=experts.device)
    return used.scatter_(2, experts, True)


def check_start(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: Tensor, *, new_tokens: int, depth: int
) -> None:
    """Raise UserError when prompts [B, P] cannot be continued by `new_tokens` in rounds of up to `depth` tokens."""
    check_pair(target, draft)
    check_new_tokens(new_tokens)
    check_depth(depth)
    check_length(target, prompts, new_tokens + depth)


def check_new_tokens(new_tokens: int) -> None:
    """Raise UserError when there is nothing to write."""
    if new_tokens < 1:
        raise UserError(f"{new_tokens} new tokens leave nothing to decode: ask for 1 or more")


def check_depth(depth: int) -> None:
    """Raise UserError when there is nothing to draft."""
    if depth < 1:
        raise UserError(f"a depth of {depth} drafts nothing: give 1 or more, or decode with the target alone")


def check_pair(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Raise UserError when draft and target do not have the same vocabulary and layout of keys and values."""
    ours, theirs = target.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise UserError(f"the draft has a vocabulary of {theirs} tokens, the target one of {ours}: draft with a "
                        f"quantised copy of the target, or with a model that shares its tokenizer")  # fmt: skip
    ours, theirs = (kv_layout(model.config) for model in (target, draft))
    if parted := [name for name in ours if ours[name] != theirs[name]]:
        said = ", ".join(f"{name} {theirs[name]}, the target's {ours[name]}" for name in parted)
        raise UserError(f"the draft cannot continue from the target's keys and values ({said}): draft with a quantised "
                        f"copy of the target, or with a model of the same attention shape")  # fmt: skip


def check_length(target: PreTrainedModel, prompts: Tensor, further_tokens: int) -> None:
    """Raise UserError when prompts [B, P] and what is to come exceed the context."""
    limit, needed = target.config.max_position_embeddings, prompts.shape[1] + further_tokens
    if prompts.shape[1] < 2:
        raise UserError("a prompt needs at least 2 tokens: one for the shared prefix and one to go on from")
    if needed > limit:
        raise UserError(f"prompt, new tokens and draft window need {needed} positions, the model has {limit}: ask for "
                        f"{needed - limit} fewer new tokens or shorten the prompt")  # fmt: skip
