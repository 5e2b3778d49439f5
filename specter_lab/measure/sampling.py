"""Sampling, and the rule by which a target accepts a draft's tokens.

The rule is that of Leviathan et al. (arXiv 2211.17192, algorithm 1) and Chen et al. (arXiv 2302.01318): the sequence
follows the target's distribution exactly, whatever the draft's is. Greedy decoding is temperature 0: both distributions
are one-hot, so a token is accepted when it is the target's choice, and the residual is the target's choice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

# (drafted [B, K], draft's q [B, K, V], target's p [B, K + 1, V], generator) -> accepted [B], next token [B, 1]
AcceptRule = Callable[[Tensor, Tensor, Tensor, Generator], tuple[Tensor, Tensor]]

GREEDY = 0.0  # temperature


def distribution(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Next-token probabilities of logits [..., V], float32; one-hot at temperature 0. A tensor [...] has one for every row."""
    if isinstance(temperature, Tensor):
        warm = (temperature > GREEDY)[..., None]
        drawn = distribution(logits / torch.where(warm, temperature[..., None], 1.0), 1.0)
        return torch.where(warm, drawn, distribution(logits, GREEDY))
    if temperature == GREEDY:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.softmax(logits.float() / temperature, dim=-1)


def sample(probabilities: Tensor, generator: Generator) -> Tensor:
    """One token per row of [B, V], which need not sum to one: [B, 1]; by inversion, so one draw serves a row."""
    return invert(probabilities, _uniform(len(probabilities), generator))


def invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The token at `uniform` [B, 1] float64 of the cumulative distribution: [B, V] -> [B, 1]."""
    cumulative = probabilities.double().cumsum(dim=-1)
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)


def _uniform(rows: int, generator: Generator) -> Tensor:
    return torch.rand(rows, 1, generator=generator, device=generator.device, dtype=torch.float64)


def next_token(logits: Tensor, temperature: float, generator: Generator) -> Tensor:
    """One token per row of logits [B, V]: [B, 1]; at temperature 0 nothing is drawn."""
    if temperature == GREEDY:
        return logits.argmax(dim=-1, keepdim=True)
    return sample(distribution(logits, temperature), generator)


def accepted_length(agreed: Tensor) -> Tensor:
    """How many of K drafted tokens come before the first that was not agreed to: bool [B, K] -> [B]."""
    return agreed.long().cumprod(dim=1).sum(dim=1)


def accept(drafted: Tensor, q: Tensor, p: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """The standard rule: keep x with probability min(1, p(x) / q(x)); at the first rejection draw from max(p - q, 0).

    Args:
        drafted: [B, K], drawn from `q`.
        q: [B, K, V] the draft's distributions.
        p: [B, K + 1, V] the target's, the last one after the whole window.
        generator: of the acceptance and of the drawn token.

    Returns:
        Accepted tokens [B], 0..K, and the token that follows them [B, 1]: drawn from the residual after a rejection,
        from `p` itself (the bonus token) when all were accepted.
    """
    uniform = torch.rand(drafted.shape, generator=generator, device=drafted.device)
    return accept_drawn(drafted, q, p, uniform, _uniform(len(drafted), generator))


def accept_drawn(
    drafted: Tensor, q: Tensor, p: Tensor, uniform: Tensor, last: Tensor, depths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`accept` with its random numbers given: one for every drafted token [B, K], and `last` [B, 1] float64.

    Args:
        depths: [B] drafted tokens of a row that count, -1 for a row that is not to be judged, which accepts -1; None: all count.
    """
    p_drafted = p[:, :-1].gather(2, drafted[..., None]).squeeze(2)  # [B, K]
    q_drafted = q.gather(2, drafted[..., None]).squeeze(2)  # [B, K]
    accepted = accepted_length(uniform * q_drafted < p_drafted)
    if depths is not None:
        accepted = torch.minimum(accepted, depths)
        counts = torch.arange(q.shape[1], device=q.device) < depths[:, None]  # [B, K]
        q = torch.where(counts[..., None], q, 0.0)
    p_next = at(p, accepted)  # [B, V]
    residual = (p_next - at(with_nothing_after(q), accepted)).clamp_min(0)
    no_residual = residual.sum(dim=-1, keepdim=True) == 0  # p = q up to rounding
    return accepted, invert(torch.where(no_residual, p_next, residual), last)


def at(distributions: Tensor, index: Tensor) -> Tensor:
    """Each row's distribution number `index` [B]: [B, N, V] -> [B, V]."""
    return distributions[torch.arange(len(index), device=index.device), index]


def with_nothing_after(q: Tensor) -> Tensor:
    """The draft's distributions [B, K, V] and zeros after them [B, K + 1, V]: it proposes nothing at the bonus."""
    return torch.cat([q, q.new_zeros(len(q), 1, q.shape[-1])], dim=1)
