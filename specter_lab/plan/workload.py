"""Recorded windows as the simulator reads them: per round and layer, which experts are needed and how often.

A small model's windows stand for a deeper model of the same routing geometry: its MoE layers are repeated until there are
enough. Results that use this say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specter_lab.errors import UserError
from specter_lab.measure.windows import Windows
from specter_lab.models.anatomy import Anatomy
from specter_lab.plan.serve import Needs


@dataclass(frozen=True)
class Round:
    """One round's routing, by MoE layer of the simulated model. Depth 0 is a step of plain decoding."""

    depth: int
    accepted: tuple[int, ...]  # per request
    drafted: Sequence[
        np.ndarray
    ]  # K steps of [B, L, k], experts the draft uses; of a tree [W, L, k], its nodes' that stay
    drafted_weights: Sequence[np.ndarray]  # the same shapes
    needs: Needs
    draft_needs: tuple[Needs, ...] | None  # [K] of the draft's steps, when it uses fewer of the target's own experts
    draft_reads: tuple[tuple[int, float], ...] | None = (
        None  # [K] nodes of a tree, distinct experts per layer; None: no tree
    )


@dataclass
class Workload:
    """Windows of a small model, stretched to `layers` MoE layers. Rounds are made once and kept."""

    windows: Windows
    layers: int
    _layer_map: np.ndarray = field(init=False)
    _rounds: dict[tuple, Round] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._layer_map = np.arange(self.layers) % self.windows.layers

    @property
    def requests(self) -> int:
        return self.windows.requests

    @property
    def num_experts(self) -> int:
        return self.windows.num_experts

    @property
    def fewer(self) -> bool:
        """Whether the draft used fewer experts per token than the target."""
        return self.windows.draft.shape[-1] < self.windows.target.shape[-1]

    def decoding(self) -> np.ndarray:
        """Experts of every request's tokens one by one, as plain decoding uses them: [R, N, L, k]."""
        return self.windows.target[:, :, 0, self._layer_map].astype(np.int64)

    def round(self, requests: Sequence[int], positions: Sequence[int], depth: int) -> Round:
        """The round of `depth` of some requests together, each at its own position.

        Raises:
            UserError: a depth that was not recorded, or is none.
        """
        most = self.windows.depth
        if not isinstance(depth, int | np.integer) or not 0 <= depth <= most:
            raise UserError(f"depth {depth} was asked for, windows were recorded to depth {most}: give 0 to {most}")
        key = (*requests, *positions, depth)
        if key not in self._rounds:
            self._rounds[key] = self._make(np.array(requests), np.array(positions), depth)
        return self._rounds[key]

    def prefill(self, requests: Sequence[int]) -> Needs:
        """What reading the prompts of some requests, but for their last tokens, needs."""
        experts = self.windows.prompt[list(requests)].astype(np.int64)  # [B, P - 1, Lz, k]
        return self._needs(experts.reshape(-1, *experts.shape[2:]))

    def _make(self, requests: np.ndarray, positions: np.ndarray, depth: int) -> Round:
        w = self.windows
        used = w.target[requests, positions, : depth + 1].astype(np.int64)  # [B, K + 1, Lz, k]
        weights = w.target_weights[requests, positions, : depth + 1]
        accepted = np.minimum(w.accepted[requests, positions], depth)
        drafted, drafted_weights = (
            np.ascontiguousarray(array[requests, positions, :depth].swapaxes(0, 1)[:, :, self._layer_map], kind)
            for array, kind in ((w.draft, np.int64), (w.draft_weights, np.float32))
        )  # [K, B, L, k]
        needs = self._needs(used.reshape(-1, *used.shape[2:]), weights.reshape(-1, *used.shape[2:]))
        of_draft = tuple(map(self._draft_needs, drafted, drafted_weights)) if self.fewer else None
        return Round(depth, tuple(accepted.tolist()), drafted, drafted_weights, needs, of_draft)

    def _draft_needs(self, drafted: np.ndarray, weights: np.ndarray) -> Needs:
        layers = self.windows.layers
        return self._needs(drafted[:, :layers], weights[:, :layers])

    def _needs(self, used: np.ndarray, weights: np.ndarray | None = None) -> Needs:
        """Experts [T, Lz, k], and their routing weights (0: not recorded), as needs of the simulated layers."""
        layers, num_experts = self.windows.layers, self.windows.num_experts
        flat = (used + np.arange(layers)[:, None] * num_experts).ravel()
        counts = np.bincount(flat, minlength=layers * num_experts).reshape(layers, num_experts)
        weights = np.zeros(used.shape) if weights is None else weights
        sums = np.bincount(flat, weights.ravel(), counts.size).reshape(counts.shape)
        layer, experts = counts[self._layer_map].nonzero()
        first = np.searchsorted(layer, np.arange(self.layers + 1))
        own = self._layer_map[layer]
        tokens = np.ascontiguousarray(used[:, self._layer_map].swapaxes(0, 1))  # [L, T, k]
        return Needs(first, experts, counts[own, experts], sums[own, experts].astype(np.float64), tokens)


def workload_for(windows: Windows, model: Anatomy) -> Workload:
    """Windows as a workload of `model`.

    Raises:
        UserError: windows of a model with another number of experts or another top-k.
    """
    ours, theirs = (windows.num_experts, windows.target.shape[-1]), (model.num_experts, model.top_k)
    if ours != theirs:
        raise UserError(f"the windows route over {ours[0]} experts, top-{ours[1]}; {model.name} has {theirs[0]}, "
                        f"top-{theirs[1]}: record windows of a model with its routing geometry")  # fmt: skip
    return Workload(windows, model.moe_layers)
