"""Rounds as an engine ran them, for the simulator: the same routing and acceptance, round by round, in virtual time.

A `Replay` has what `plan.simulate` asks of a `Workload`; but a request's position decides its round, so the depths are those of the
recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from specter_lab.plan.serve import Needs
from specter_lab.plan.workload import Round


@dataclass
class Replay:
    """Recorded requests, each a list of rounds."""

    num_experts: int
    layers: int  # MoE layers of the simulated model; recorded ones are repeated until there are enough
    fewer: bool = False
    _rounds: list[dict[int, Round]] = field(
        default_factory=list
    )  # per request: position -> the round that begins there
    _ends: list[int] = field(default_factory=list)  # per request: tokens recorded

    @property
    def requests(self) -> int:
        return len(self._rounds)

    @property
    def windows(self) -> SimpleNamespace:
        """How many tokens every request has."""
        return SimpleNamespace(positions=min(self._ends))

    def begin_request(self) -> None:
        self._rounds.append({})
        self._ends.append(0)

    def add(self, accepted: int, drafted: np.ndarray, drafted_weights: np.ndarray, used: np.ndarray) -> None:
        """A round: experts the draft used [K, L, k] with their weights, accepted tokens, and what the target used [L, K + 1, k]."""
        self._add(accepted, drafted[:, None], drafted_weights[:, None], used, None)  # steps of one token

    def add_tree(
        self, accepted: int, drafted: Sequence[np.ndarray], drafted_weights: Sequence[np.ndarray],
        draft_reads: Sequence[tuple[int, float]], used: np.ndarray,
    ) -> None:  # fmt: skip
        """A round of a tree with N nodes.

        Args:
            accepted: nodes.
            drafted: per step of the draft, experts [W, L, k] of the nodes it read that stayed nodes when it had read them.
            drafted_weights: their routing weights.
            draft_reads: per step, nodes that the draft read and distinct experts per layer that it used for them.
            used: [L, N + 1, k] what the target used.
        """
        self._add(accepted, drafted, drafted_weights, used, tuple(draft_reads))

    def _add(
        self, accepted: int, drafted: Sequence[np.ndarray], drafted_weights: Sequence[np.ndarray], used: np.ndarray,
        draft_reads: tuple[tuple[int, float], ...] | None,
    ) -> None:  # fmt: skip
        layer = np.arange(self.layers) % len(used)
        experts = [step[:, layer].astype(np.int64) for step in drafted]  # [W, L, k] each
        weights = [step[:, layer].astype(np.float32) for step in drafted_weights]
        needs = needs_of(used[layer].astype(np.int64), self.num_experts)
        self._rounds[-1][self._ends[-1]] = Round(len(drafted), (accepted,), experts, weights, needs, None, draft_reads)
        self._ends[-1] += accepted + 1

    def prefill(self, requests: Sequence[int]) -> Needs:
        """Nothing: reading the prompt was not recorded."""
        return needs_of(np.empty((self.layers, 0, 1), np.int64), self.num_experts)

    def round(self, requests: Sequence[int], positions: Sequence[int], depth: int) -> Round:
        """The recorded round of one request at its position."""
        (request,), (position,) = requests, positions
        return self._rounds[request][position]


def needs_of(used: np.ndarray, num_experts: int) -> Needs:
    """What a pass needs whose tokens use the experts [L, T, k]; routing weights count as nothing."""
    layers, tokens, top_k = used.shape
    flat = (used.reshape(layers, -1) + np.arange(layers)[:, None] * num_experts).ravel()
    counts = np.bincount(flat, minlength=layers * num_experts).reshape(layers, num_experts)
    layer, experts = counts.nonzero()
    first = np.searchsorted(layer, np.arange(layers + 1))
    return Needs(first, experts, counts[layer, experts], np.zeros(len(experts)), np.ascontiguousarray(used))
