"""One request in flight: the buffers a round reads and writes, and the two passes it is made of.

Everything a pass reads lies in buffers of fixed address, so that on a GPU each pass is captured once (`graphs`) and then only
replayed; on a CPU the same functions are called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from specter_lab.engine.decoder import Decoder, Experts, KvCache, forward, new_kv_cache
from specter_lab.engine.graphs import captured
from specter_lab.engine.ops import Ops
from specter_lab.engine.served import TargetExperts
from specter_lab.measure.sampling import GREEDY, accept_drawn, distribution, invert
from specter_lab.plan.policy import NO_LOADS, Loads

PREFILL_TOKENS = 32  # read in one pass
DRAFT = "draft"  # the name of its graph


class Verified(NamedTuple):
    """What a verification tells the host; on a GPU it is there once the stream has come so far."""

    told: Tensor  # [K + 2] on the host: accepted, the K drafted tokens, the token that follows the accepted ones
    used: Tensor  # [L, K + 1, k] on the host: experts of every token
    waited: Tensor  # [2] on the host, see `experts.ExpertMemory.waited`

    def committed(self) -> tuple[int, list[int]]:
        """How many drafted tokens were accepted, and the tokens that this round adds."""
        accepted, *drafted, last = self.told.tolist()
        return accepted, [*drafted[:accepted], last]


@dataclass
class Session:
    """Buffers of one request."""

    decoder: Decoder
    draft_experts: Experts
    target_experts: TargetExperts
    ops: Ops
    temperature: float
    kv: KvCache
    position: Tensor  # [1] int64, committed tokens but the last
    step: Tensor  # [1] int64, tokens drafted so far
    window: Tensor  # [K + 1] int64, the last committed token and the drafted ones; K is the deepest window
    q: Tensor  # [K, V] float32, distributions the drafted tokens were drawn from
    drafted: Tensor  # [K, L, k] experts the draft used
    drafted_weights: Tensor  # [K, L, k]
    draws: Tensor  # [3, K + 1] float64 in [0, 1): one row for drafting, one for accepting, one for what follows
    graphs: dict[object, Callable[[], object]] = field(default_factory=dict)  # DRAFT, and verification by depth

    @property
    def depth(self) -> int:
        """Of the deepest window."""
        return len(self.window) - 1

    def begin(self, prompt: Tensor) -> None:
        """Read a prompt [P]; its last token begins the first window."""
        self.position.zero_()
        self.step.zero_()
        for piece in prompt[:-1].split(PREFILL_TOKENS):
            self.target_experts.run(partial(self._read, piece))
            self.position += len(piece)
        self.window[:1] = prompt[-1:]

    def draw(self, generator: Generator, depth: int) -> None:
        """Fresh random numbers for a round of this depth, however deep the session's windows may be; greedy decoding needs none."""
        if self.temperature != GREEDY:
            size, like = (len(self.draws), depth + 1), {"device": self.draws.device, "dtype": self.draws.dtype}
            self.draws[:, : depth + 1] = torch.rand(size, generator=generator, **like)

    def prepare(self, depth: int) -> None:
        """Capture what a round of this depth needs, so that no round is slowed by it."""
        if depth:
            self._pass(DRAFT, self._draft_step)
        if self.window.is_cuda and depth not in self.graphs:
            self.target_experts.run(lambda: self._pass(depth, partial(self._verify, depth)))  # capturing runs it once

    def draft_step(self) -> None:
        """Draft one token after `window[step]`."""
        self._pass(DRAFT, self._draft_step)()

    def verify(self, depth: int, loads: Loads = NO_LOADS) -> Verified:
        """Read the window of `depth` drafted tokens, accept, and begin the next window; the position moves on.

        Args:
            loads: experts to copy for it, those of early layers first.
        """
        self.prepare(depth)
        launch = self._pass(depth, partial(self._verify, depth))
        return self.target_experts.run(launch, loads, captured=self.window.is_cuda)

    def _read(self, ids: Tensor) -> None:
        forward(self.decoder, ids, self.position, self.kv, self.target_experts, self.ops)

    def _draft_step(self) -> None:
        token = self.window.index_select(0, self.step)
        passed = forward(self.decoder, token, self.position + self.step, self.kv, self.draft_experts, self.ops)
        q = distribution(passed.logits, self.temperature)  # [1, V]
        drawn = (
            invert(q, self.draws[:1].index_select(1, self.step)).view(1)
            if self.temperature
            else passed.logits.argmax(-1)
        )
        self.window.index_copy_(0, self.step + 1, drawn)
        self.q.index_copy_(0, self.step, q)
        self.drafted.index_copy_(0, self.step, passed.indices.transpose(0, 1))
        self.drafted_weights.index_copy_(0, self.step, passed.weights.transpose(0, 1))
        self.step += 1

    def _verify(self, depth: int) -> Verified:
        passed = forward(self.decoder, self.window[: depth + 1], self.position, self.kv, self.target_experts, self.ops)
        p, drafted = distribution(passed.logits, self.temperature), self.window[1 : depth + 1]
        accepted, last = accept_drawn(
            drafted[None], self.q[None, :depth], p[None], self.draws[None, 1, :depth], self.draws[2:, :1]
        )
        waited = self.target_experts.memory.waited
        told = torch.cat([accepted, drafted, last[0]])
        result = Verified(*(_on_host(part) for part in (told, passed.indices, waited)))
        waited.zero_()
        self.position += accepted + 1
        self.window[:1] = last[0]
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
    temperature: float,
) -> Session:  # fmt: skip
    """Buffers for up to `max_tokens` committed tokens and windows of `depth`."""
    shape, like = decoder.shape, decoder.embedding
    numbers = {"device": like.device, "dtype": torch.int64}
    routed = (max(1, depth), len(shape.moe_layers), shape.top_k)
    return Session(
        decoder, draft_experts, target_experts, ops, temperature, new_kv_cache(shape, max_tokens + depth + 1, like),
        position=torch.zeros(1, **numbers), step=torch.zeros(1, **numbers), window=torch.zeros(depth + 1, **numbers),
        q=torch.zeros(max(1, depth), shape.vocab, device=like.device), drafted=torch.zeros(routed, **numbers),
        drafted_weights=torch.zeros(routed, device=like.device),
        draws=torch.zeros(3, depth + 1, device=like.device, dtype=torch.float64),
    )  # fmt: skip


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; a GPU writes it when it comes to that."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
