"""What a draft believes about its candidates: the chance that each is the one the target accepts, from the draft alone.

A tree is grown by these chances. A belief that is wrong costs tokens, never exactness. The draft's own probability is
what EAGLE-2 and OPT-Tree go by; but it doubts a draft that is almost the target too much: two laws may be flat and still have
the same best token. So two beliefs with numbers fitted on other requests stand beside it.

    greedy     the target's logits are the draft's and Gumbel noise of some scale s, so its choice is distributed as
               softmax(logits / s): q^(1 / s), normalised
    sampled    a first candidate x is rejected with chance c (1 - q(x)), and each later one of its siblings with chance d
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# (draft's laws [N, V] float64, candidates' tokens in order [N, W]) -> chances [N, W], which sum to 1 at most
Belief = Callable[[Tensor, Tensor], Tensor]

SCALES = torch.logspace(-1.5, 0.5, 41, dtype=torch.float64)  # that are tried
LARGEST = 1 << 24  # numbers in one product of laws: 128 MiB


def as_drafted(law: Tensor, tokens: Tensor) -> Tensor:
    """The draft's own probability of each candidate."""
    return law.gather(1, tokens)


@dataclass(frozen=True)
class Sharpened:
    """Greedy: the draft's law with its logits divided by `scale`."""

    scale: float

    def __call__(self, law: Tensor, tokens: Tensor) -> Tensor:
        return torch.softmax(law.log() / self.scale, dim=-1).gather(1, tokens)


@dataclass(frozen=True)
class Coupled:
    """Sampled: the first candidate is hardly ever rejected, for draft and target draw from almost the same law."""

    doubt: float  # c
    later: float  # d

    def __call__(self, law: Tensor, tokens: Tensor) -> Tensor:
        rejected = (self.doubt * (1 - law.gather(1, tokens[:, :1]))).clamp_max(1.0)  # [N, 1]
        before = self.later ** torch.arange(
            tokens.shape[1] - 1, device=law.device
        )  # [W - 1] all siblings but the first
        return torch.cat([1 - rejected, rejected * (1 - self.later) * before], dim=1)


def fit_sharpened(draft_logits: Tensor, target_logits: Tensor) -> Sharpened:
    """The scale under which the target's choices are most likely: logits [N, V] of both at the same places."""
    choice = target_logits.argmax(dim=-1, keepdim=True)  # [N, 1]
    logits = draft_logits.double()
    likely = [torch.log_softmax(logits / scale, dim=-1).gather(1, choice).mean() for scale in SCALES]
    return Sharpened(float(SCALES[torch.stack(likely).argmax()]))


def fit_coupled(draft_logits: Tensor, target_logits: Tensor) -> Coupled:
    """Numbers that give the expected rejections of a first and a second candidate: logits [N, V] at the same places.

    Which first candidate was rejected is averaged over exactly, for every place by itself.
    """
    q, p = (torch.softmax(logits.double(), dim=-1) for logits in (draft_logits, target_logits))
    too_much = (q - p).clamp_min(0)  # [N, V] chance that this token is drawn first, and rejected
    first = too_much.sum(dim=1)  # [N] total variation
    doubt = first.sum() / (1 - (q * q).sum(dim=1)).sum()
    accepted = q.new_zeros(())
    for place in first.nonzero().flatten():
        left = (p[place] - q[place]).clamp_min(0) / first[place]  # [V] the residual law
        drawn = too_much[place].nonzero().flatten()  # [X] tokens that can be rejected
        for part in drawn.split(max(1, LARGEST // q.shape[1])):
            second = (q[place] / (1 - q[place][part, None])).scatter(1, part[:, None], 0.0)  # [X, V]
            accepted += too_much[place][part] @ torch.minimum(left, second).sum(dim=1)
    return Coupled(float(doubt), float(1 - accepted / first.sum()))
