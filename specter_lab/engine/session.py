"""One request in flight: the buffers a round reads and writes, and the two passes it is made of.

Everything a pass reads lies in buffers of fixed address, so that on a GPU each pass is captured once (`graphs`) and then only
replayed; on a CPU the same functions are called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specter_lab.engine.decoder import Decoder, Experts, KvCache, forward, new_kv_cache
from specter_lab.engine.graphs import captured
from specter_lab.engine.ops import Ops
from specter_lab.engine.served import TargetExperts
from specter_lab.measure.sampling import GREEDY, distribution

PREFILL_TOKENS = 32  # read in one pass


@dataclass
class Session:
    """Buffers of one request; `depth` is the deepest window they hold."""

    decoder: Decoder
    draft_experts: Experts
    target_experts: TargetExperts
    ops: Ops
    temperature: float
    kv: KvCache
    position: Tensor  # [1] int64, committed tokens but the last
    step: Tensor  # [1] int64, tokens drafted so far
    window: Tensor  # [K + 1] int64, the last committed token and the drafted ones
    uniform: Tensor  # [K] float64, one draw for every drafted token
    q: Tensor  # [K, V] float32, distributions the drafted tokens were drawn from
    drafted: Tensor  # [K, L, k] experts the draft used
    drafted_weights: Tensor  # [K, L, k]
    graphs: dict[tuple, Callable[[], object]] = field(default_factory=dict)

    def draft_step(self) -> None:
        """Draft one token after `window[step]`."""
        self._run("draft", self._draft_step)

    def verify(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The target's distributions after each of the first `tokens` of the window [T, V], and its experts [L, T, k]."""
        return self._run(("verify", tokens), lambda: self._verify(tokens))

    def prefill(self, ids: Tensor) -> None:
        """Read ids [P] into the empty prefix."""
        for piece in ids.split(PREFILL_TOKENS):
            forward(self.decoder, piece, self.position, self.kv, self.target_experts, self.ops)
            self.position += len(piece)

    def _draft_step(self) -> None:
        token = self.window.index_select(0, self.step)
        passed = forward(self.decoder, token, self.position + self.step, self.kv, self.draft_experts, self.ops)
        q, drawn = self._drawn(passed.logits)  # [1, V], [1]
        self.window.index_copy_(0, self.step + 1, drawn)
        self.q.index_copy_(0, self.step, q)
        self.drafted.index_copy_(0, self.step, passed.indices.transpose(0, 1))
        self.drafted_weights.index_copy_(0, self.step, passed.weights.transpose(0, 1))
        self.step += 1

    def _drawn(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Distribution of logits [1, V], and a token drawn from it."""
        if self.temperature == GREEDY:
            best = logits.argmax(dim=-1)
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best[:, None], 1.0), best
        q = distribution(logits, self.temperature)
        return q, _draw(q, self.uniform.index_select(0, self.step))

    def _verify(self, tokens: int) -> tuple[Tensor, Tensor]:
        passed = forward(self.decoder, self.window[:tokens], self.position, self.kv, self.target_experts, self.ops)
        return distribution(passed.logits, self.temperature), passed.indices

    def _run(self, name: object, function: Callable[[], object]) -> object:
        if not self.window.is_cuda:
            return function()
        if name not in self.graphs:
            self.graphs[name] = captured(function, (self.position, self.step, self.window))
        return self.graphs[name]()


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
        uniform=torch.zeros(max(1, depth), device=like.device, dtype=torch.float64),
        q=torch.zeros(max(1, depth), shape.vocab, device=like.device), drafted=torch.zeros(routed, **numbers),
        drafted_weights=torch.zeros(routed, device=like.device),
    )  # fmt: skip


def _draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """One token per row of [B, V] by inversion of uniform [B]: [B]."""
    cumulative = probabilities.double().cumsum(dim=-1)
    return torch.searchsorted(cumulative, (uniform[:, None] * cumulative[:, -1:]), right=True).squeeze(1)
