"""Requests in flight, a lane each: the buffers a round reads and writes, and the two passes it is made of.

Everything a pass reads lies in buffers of fixed address, so that on a GPU each pass is captured once (`graphs`) and then only
replayed; on a CPU the same functions are called. Requests come and go without a capture: a lane's depth is a number in a buffer, -1
where no request is. Only the first round of a new deepest window captures one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from specter_lab.engine.decoder import Decoder, Experts, KvCache, forward, new_kv_cache
from specter_lab.engine.graphs import captured
from specter_lab.engine.ops import Ops
from specter_lab.engine.served import TargetExperts
from specter_lab.measure.sampling import GREEDY, accept_drawn, distribution, invert
from specter_lab.plan.policy import NO_LOADS, Loads

PREFILL_TOKENS, PREFILL_TOKENS_OF_ALL = 32, 512  # of one prompt, and of all together, that are read in one pass
DRAFT = "draft"  # the name of its graph
NO_REQUEST = -1  # depth of a lane that is free


class Verified(NamedTuple):
    """What a verification tells the host; on a GPU it is there once the stream has come so far."""

    told: Tensor  # [B, K + 2] on the host: accepted, the K drafted tokens, the token that follows the accepted ones
    used: Tensor  # [L, B (K + 1), k] on the host: experts of every token, NOT_NOW of those that do not count
    waited: Tensor  # [2] on the host, see `experts.ExpertMemory.waited`

    def committed(self) -> list[tuple[int, list[int]]]:
        """How many drafted tokens each lane accepted, and the tokens that this round adds; a free lane adds none."""
        found = []
        for accepted, *drafted, last in self.told.tolist():
            found.append((accepted, [*drafted[:accepted], last]) if accepted >= 0 else (0, []))
        return found


@dataclass
class Session:
    """Buffers of B requests."""

    decoder: Decoder
    draft_experts: Experts
    target_experts: TargetExperts
    ops: Ops
    temperature: float | Tensor  # of all, or [B] float32 of each lane
    kv: KvCache
    position: Tensor  # [B] int64, committed tokens but the last
    depths: Tensor  # [B] int64, drafted tokens that count in this round; NO_REQUEST: a free lane
    step: Tensor  # [1] int64, tokens drafted so far
    window: Tensor  # [B, K + 1] int64, the last committed token and the drafted ones; K is the deepest window
    q: Tensor  # [B, K, V] float32, distributions the drafted tokens were drawn from
    drafted: Tensor  # [K, B, L, k] experts the draft used
    drafted_weights: Tensor  # [K, B, L, k]
    draws: Tensor  # [3, B, K + 1] float64 in [0, 1): one part for drafting, one for accepting, one for what follows
    graphs: dict[object, Callable[[], object]] = field(default_factory=dict)  # DRAFT, and verification by depth

    @property
    def lanes(self) -> int:
        return len(self.window)

    @property
    def depth(self) -> int:
        """Of the deepest window."""
        return self.window.shape[1] - 1

    @property
    def nbytes(self) -> int:
        """Of what grows with lanes: keys and values, the draft's distributions, and the target's while it is judged."""
        return self.kv.nbytes + self.q.nbytes + 4 * self.window.numel() * self.q.shape[2]

    @property
    def samples(self) -> bool:
        return isinstance(self.temperature, Tensor) or self.temperature != GREEDY

    def begin(self, prompts: Sequence[Tensor], first_lane: int = 0) -> None:
        """Read prompts [P] side by side, into one lane after the other; their last tokens begin the first windows."""
        lanes = slice(first_lane, first_lane + len(prompts))
        position, kv = self.position[lanes].zero_(), self.kv.lanes(lanes)
        self.step.zero_()
        read = pad_sequence([prompt[:-1] for prompt in prompts], batch_first=True)  # [B, longest]
        lengths = position.new_tensor([len(prompt) - 1 for prompt in prompts])
        for piece in read.split(min(PREFILL_TOKENS, max(1, PREFILL_TOKENS_OF_ALL // len(prompts))), dim=1):
            live = (position[:, None] + torch.arange(piece.shape[1], device=piece.device) < lengths[:, None]).flatten()
            self.target_experts.run(
                partial(forward, self.decoder, piece.flatten(), position, kv, self.target_experts, self.ops,
                        live if len(prompts) > 1 else None, logits=False)
            )  # fmt: skip
            position += piece.shape[1]
        position.copy_(lengths)
        self.window[lanes, 0] = torch.stack([prompt[-1] for prompt in prompts])

    def set_depths(self, depths: Sequence[int]) -> None:
        """Drafted tokens of every lane that count in the next round, NO_REQUEST for a free one.

        A free lane's tokens are computed as well; at position 0 they stay in its own part of the cache.
        """
        self.depths.copy_(torch.tensor(depths))
        self.position.masked_fill_(self.depths == NO_REQUEST, 0)

    def draw(self, generators: Sequence[Generator | None], depth: int) -> None:
        """Fresh random numbers for a round of this depth, however deep the session's windows may be, of each lane's own
        generator; greedy decoding needs none."""
        if not self.samples:
            return
        size, like = (len(self.draws), depth + 1), {"device": self.draws.device, "dtype": self.draws.dtype}
        for lane, generator in enumerate(generators):
            if generator is not None:
                self.draws[:, lane, : depth + 1] = torch.rand(size, generator=generator, **like)

    def prepare(self, depth: int) -> None:
        """Capture what a round of this depth needs, so that no round is slowed by it."""
        if depth:
            self._pass(DRAFT, self._draft_step)
        if self.window.is_cuda and depth not in self.graphs:
            self.target_experts.run(lambda: self._pass(depth, partial(self._verify, depth)))  # capturing runs it once

    def draft_step(self) -> None:
        """Draft one token after `window[:, step]`."""
        self._pass(DRAFT, self._draft_step)()

    def verify(self, depth: int, loads: Loads = NO_LOADS) -> Verified:
        """Read the windows of `depth` drafted tokens, accept, and begin the next windows; positions move on.

        Args:
            loads: experts to copy for it, those of early layers first.
        """
        self.prepare(depth)
        launch = self._pass(depth, partial(self._verify, depth))
        return self.target_experts.run(launch, loads, captured=self.window.is_cuda)

    def _draft_step(self) -> None:
        tokens = self.window.index_select(1, self.step).flatten()  # [B]
        live = self.depths > self.step if self.lanes > 1 else None
        passed = forward(self.decoder, tokens, self.position + self.step, self.kv, self.draft_experts, self.ops, live)
        q = distribution(passed.logits, self.temperature)  # [B, V]
        drawn = (
            invert(q, self.draws[0].index_select(1, self.step))
            if self.samples
            else passed.logits.argmax(-1, keepdim=True)
        )  # [B, 1]
        self.window.index_copy_(1, self.step + 1, drawn)
        self.q.index_copy_(1, self.step, q[:, None])
        self.drafted.index_copy_(0, self.step, passed.indices.transpose(0, 1)[None])
        self.drafted_weights.index_copy_(0, self.step, passed.weights.transpose(0, 1)[None])
        self.step += 1

    def _verify(self, depth: int) -> Verified:
        tokens, one = self.window[:, : depth + 1].flatten(), self.lanes == 1
        live = None if one else (torch.arange(depth + 1, device=tokens.device) <= self.depths[:, None]).flatten()
        passed = forward(self.decoder, tokens, self.position, self.kv, self.target_experts, self.ops, live)
        warmth = self.temperature
        if isinstance(warmth, Tensor):
            warmth = warmth.repeat_interleave(depth + 1)
        p = distribution(passed.logits, warmth).unflatten(0, (self.lanes, -1))  # [B, K + 1, V]
        drafted = self.window[:, 1 : depth + 1]
        accepted, last = accept_drawn(
            drafted, self.q[:, :depth], p, self.draws[1, :, :depth], self.draws[2, :, :1], None if one else self.depths
        )
        waited = self.target_experts.memory.waited
        told = torch.cat([accepted[:, None], drafted, last], dim=1)
        result = Verified(*(_on_host(part) for part in (told, passed.indices, waited)))
        waited.zero_()
        self.position += accepted + 1
        self.window[:, :1] = last
        self.step.zero_()
        return result

    def _pass(self, name: object, function: Callable[[], object]) -> Callable[[], object]:
        if not self.window.is_cuda:
            return function
        if name not in self.graphs:
            self.graphs[name] = captured(function, (self.position, self.step, self.window))
        return self.graphs[name]


def new_session(
    decoder: Decoder, draft_experts: Experts, target_experts: TargetExperts, ops: Ops, *, max_tokens: int, depth: int,
    temperature: float | None, lanes: int = 1,
) -> Session:  # fmt: skip
    """Buffers for `lanes` requests of up to `max_tokens` committed tokens each, and windows of `depth`.

    Args:
        temperature: of all; None: each lane has its own, to be set.
    """
    shape, like = decoder.shape, decoder.embedding
    numbers = {"device": like.device, "dtype": torch.int64}
    routed = (max(1, depth), lanes, len(shape.moe_layers), shape.top_k)
    return Session(
        decoder, draft_experts, target_experts, ops,
        torch.zeros(lanes, device=like.device) if temperature is None else temperature, new_kv_cache(shape, max_tokens + depth + 1, like, lanes),
        position=torch.zeros(lanes, **numbers), depths=torch.full((lanes,), NO_REQUEST, **numbers),
        step=torch.zeros(1, **numbers), window=torch.zeros(lanes, depth + 1, **numbers),
        q=torch.zeros(lanes, max(1, depth), shape.vocab, device=like.device), drafted=torch.zeros(routed, **numbers),
        drafted_weights=torch.zeros(routed, device=like.device),
        draws=torch.zeros(3, lanes, depth + 1, device=like.device, dtype=torch.float64),
    )  # fmt: skip


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; a GPU writes it when it comes to that."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
