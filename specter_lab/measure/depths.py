"""Greedy speculative rounds at several depths for less than the sum of their costs.

Greedy text does not depend on the depth, and a window of k drafted tokens is the beginning of every deeper window that
starts at the same token. So the deepest run goes first, and a shallower one drafts and verifies only the windows that
start where no deeper one did:

    text        x_0  x_1  x_2  x_3  x_4  x_5  x_6  x_7  x_8 ...       x_0: last prompt token
    K = 4       |---- 3 accepted ---|    |---- 4 accepted ...
    K = 2       |- 2 accepted -|    |*   |- 2 accepted ...            *: the only window not drafted yet

The rounds are those of `speculate.speculative_decode` at each depth (tested).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel

from specter_lab.measure.prefix import Prefix, prefill, read, write
from specter_lab.measure.sampling import GREEDY, accepted_length
from specter_lab.measure.speculate import Rounds, check_depth, check_start, propose
from specter_lab.models.adapters import adapter_for


@dataclass(frozen=True)
class Window:
    """K tokens drafted after one token of one request, and verified."""

    accepted: int  # 0..K
    needed: np.ndarray  # [K + 1, L, k] experts the target used
    predicted: np.ndarray  # [K, L, k] experts the draft used

    @property
    def depth(self) -> int:
        return len(self.predicted)


def greedy_rounds(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: Tensor, *, new_tokens: int, depths: Sequence[int]
) -> dict[int, Rounds]:
    """Rounds of every depth for prompts [R, P], in the order of each request's text; raises as `speculative_decode`."""
    check_depth(min(depths))
    check_start(target, draft, prompts, new_tokens=new_tokens, depth=max(depths))
    known: dict[tuple[int, int], Window] = {}  # by request, and new tokens before the window
    with torch.inference_mode():
        prefix, inputs = _text(target, prompts.to(target.device), new_tokens)
        for depth in sorted(depths, reverse=True):
            while missing := _starts(known, len(prompts), new_tokens, depth, missing=True):
                known |= zip(missing, _run(target, draft, prefix, inputs, missing, depth))
    num_experts = adapter_for(target.config).num_experts(target.config)
    return {
        depth: _rounds(known, _starts(known, len(prompts), new_tokens, depth), depth, prompts.shape[1], num_experts)
        for depth in depths
    }


def _text(target: PreTrainedModel, prompts: Tensor, new_tokens: int) -> tuple[Prefix, Tensor]:
    """The target's KV of prompts [R, P] and their greedy text, and the text from the last prompt token on [R, N]."""
    prefix, last = prefill(target, prompts[:, :-1]), prompts[:, -1:]
    tokens = [token for token, *_ in write(target, prefix, last, new_tokens, GREEDY, Generator(target.device))]
    return prefix, torch.cat([last, *tokens[:-1]], dim=1)


def _starts(
    known: dict[tuple[int, int], Window], requests: int, new_tokens: int, depth: int, missing: bool = False
) -> list[tuple[int, int]]:
    """Where the rounds of one depth start, as far as windows are known; or the first place of each request without."""
    starts, ends = [], []
    for request in range(requests):
        at = 0
        while at < new_tokens and (window := known.get((request, at))) and window.depth >= depth:
            starts.append((request, at))
            at += min(window.accepted, depth) + 1
        if at < new_tokens:
            ends.append((request, at))
    return ends if missing else starts


def _run(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prefix: Prefix,
    inputs: Tensor,
    starts: Sequence[tuple[int, int]],
    depth: int,
) -> list[Window]:
    """Draft and verify the windows that start at these tokens of inputs [R, N], side by side."""
    requests, first = torch.tensor(starts, device=inputs.device).T
    verified = prefix.rows(requests)
    verified.forget(inputs.shape[1] - first)  # ends before the window's first input
    last = inputs[requests, first][:, None]
    window, _, drafted = propose(draft, copy.deepcopy(verified), last, depth, GREEDY, Generator(inputs.device))
    logits, read_by_target = read(target, verified, window)  # [B, K + 1, V]
    accepted = accepted_length(window[:, 1:] == logits[:, :-1].argmax(dim=-1)).tolist()
    needed, predicted = (r.indices.unflatten(0, (len(starts), -1)).cpu().numpy() for r in (read_by_target, drafted))
    return [Window(*of_window) for of_window in zip(accepted, needed, predicted)]


def _rounds(
    known: dict[tuple[int, int], Window],
    starts: Sequence[tuple[int, int]],
    depth: int,
    prompt_tokens: int,
    num_experts: int,
) -> Rounds:
    windows, (request, at) = [known[start] for start in starts], np.array(starts).T

    def used(experts: np.ndarray) -> np.ndarray:
        """[T, L, k] -> [L, E] bool."""
        return (experts[..., None] == np.arange(num_experts)).any(axis=(0, 2))

    return Rounds(
        depth,
        request,
        prompt_tokens - 1 + at,
        np.array([min(window.accepted, depth) for window in windows]),
        np.stack([used(window.needed[: depth + 1]) for window in windows]),
        np.stack([used(window.predicted[:depth]) for window in windows]),
    )
