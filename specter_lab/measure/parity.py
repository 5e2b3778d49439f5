"""Greedy parity: does speculative decoding write what the target alone writes? (Specter, losslessness)

In exact arithmetic it must. In floating point a verification of K+1 tokens adds in another order than a pass of one
token, so logits differ in their last bits, and where the two best tokens are closer than
that, the texts part. Two measurements: the texts themselves, and the size of that difference on given text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specter_lab.measure.prefix import prefill, read
from specter_lab.measure.speculate import check_length, plain_decode, speculative_decode

NGRAM = 8  # tokens; a text that repeats itself consists of the same ones


@dataclass(frozen=True)
class Parity:
    """One request decoded both ways."""

    new_tokens: int
    first_divergence: int | None  # new token at which the texts part, counted from 0
    margin: float | None  # plain decoding there: logit of its token minus that of the second best
    tokens_per_round: float
    repeated: float  # share of plain decoding's NGRAMs that occurred in its text before: parity is easy in a loop

    @property
    def equal_tokens(self) -> int:
        """New tokens before the first divergence."""
        return self.new_tokens if self.first_divergence is None else self.first_divergence


@dataclass(frozen=True)
class WidthEffect:
    """Logits of the same N tokens of text, read in passes of `width` tokens and of one."""

    width: int
    difference: np.ndarray  # [N] largest |difference| of a token's logits
    margin: np.ndarray  # [N] best minus second best logit, read one by one
    flipped: np.ndarray  # [N] bool, another token is the best


def greedy_parity(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: Tensor, *, new_tokens: int, depth: int
) -> list[Parity]:
    """Decode prompts [B, P] side by side greedily, with and without the draft; raises as `speculate.speculative_decode`."""
    plain = plain_decode(target, prompts, new_tokens=new_tokens)
    speculative = speculative_decode(target, draft, prompts, new_tokens=new_tokens, depth=depth)
    found = []
    for request, (ours, theirs) in enumerate(zip(speculative.tokens, plain.tokens)):
        parted = (ours != theirs).nonzero().flatten().tolist()
        rounds = speculative.rounds.of(np.array([request]))
        found.append(Parity(
            new_tokens=new_tokens,
            first_divergence=parted[0] if parted else None,
            margin=float(plain.margins[request, parted[0]]) if parted else None,
            tokens_per_round=float(rounds.accepted.mean()) + 1,
            repeated=repeated_share(theirs.tolist()),
        ))  # fmt: skip
    return found


def repeated_share(tokens: list[int]) -> float:
    """Share of the NGRAMs of a text that stand in it earlier as well."""
    grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams)


def width_effect(model: PreTrainedModel, ids: Tensor, width: int) -> WidthEffect:
    """Read text [S] in passes of `width` tokens and of one token, and compare the logits of all but its first token.

    Raises:
        UserError: the text is longer than the context or shorter than 2 tokens, or the model produced NaN.
    """
    check_length(model, ids[None], 0)
    wide, narrow = (_logits(model, ids.to(model.device), w) for w in (width, 1))  # [S - 1, V] each
    best, second = narrow.topk(2).values.T
    return WidthEffect(
        width,
        difference=(wide - narrow).abs().amax(dim=1).cpu().numpy(),
        margin=(best - second).cpu().numpy(),
        flipped=(wide.argmax(dim=1) != narrow.argmax(dim=1)).cpu().numpy(),
    )


def _logits(model: PreTrainedModel, ids: Tensor, width: int) -> Tensor:
    """Float32 logits [S - 1, V] after each token of ids [S] but the first, read in passes of `width`."""
    with torch.inference_mode():
        prefix = prefill(model, ids[None, :1])
        pieces = [read(model, prefix, piece[None])[0][0].float() for piece in ids[1:].split(width)]
    return torch.cat(pieces)
