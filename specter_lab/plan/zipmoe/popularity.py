"""What earlier prompts tell about a model's experts: long-term shares per layer, and use by causal rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specter_lab.plan.zipmoe.ranks import RankTracker, bernoulli_weights, inclusion

SETS = 1000  # layer calls that a plan is judged on


@dataclass(frozen=True)
class Popularity:
    """Use of the experts of all layers."""

    shares: np.ndarray  # [L, E] of long-term use, rows sum to 1
    rank_hits: np.ndarray  # [E] uses of the expert that had rank r at the time, all layers
    rank_sets: np.ndarray  # [N, k] ranks that layer calls of one token used

    def weights(self, active: int) -> np.ndarray:
        """[E] conditional-Bernoulli odds by rank when `active` experts of a layer are needed."""
        return _weights(tuple(self.rank_hits.tolist()), active)

    def sets(self, batch: int, seed: int = 0) -> np.ndarray:
        """Rank sets [N, batch x k] of layer calls with `batch` tokens of different requests; -1 stands for a repetition.

        The larger a batch, the more alike its calls are, and the fewer are drawn.
        """
        most = max(8, SETS // batch**2)
        rng = np.random.default_rng(seed)
        drawn = np.sort(self.rank_sets[rng.integers(0, len(self.rank_sets), (most, batch))].reshape(most, -1), axis=1)
        drawn[:, 1:][drawn[:, 1:] == drawn[:, :-1]] = -1
        return drawn


@lru_cache(maxsize=32)
def _weights(rank_hits: tuple[float, ...], active: int) -> np.ndarray:
    return bernoulli_weights(inclusion(np.array(rank_hits), active), active)


def uniform(layers: int, experts: int, top_k: int) -> Popularity:
    """Nothing is known: every expert and every set of ranks alike."""
    sets = np.random.default_rng(0).random((SETS, experts)).argsort(axis=1)[:, :top_k]
    return Popularity(np.full((layers, experts), 1 / experts), np.ones(experts), sets)


def observed(indices: Sequence[np.ndarray], num_experts: int) -> Popularity:
    """Popularity from routing, tokens in the order in which they were decoded.

    Args:
        indices: [T, k] experts used, per layer.
    """
    counts = np.stack([np.bincount(used.ravel(), minlength=num_experts) for used in indices])
    shares = (counts + 1) / (counts + 1).sum(axis=1, keepdims=True)
    sets = np.concatenate([causal_ranks(used, share) for used, share in zip(indices, shares)])
    return Popularity(shares, np.bincount(sets.ravel(), minlength=num_experts).astype(float), sets)


def causal_ranks(indices: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Ranks before each token of the experts that it used: indices [T, k] of one layer -> [T, k]."""
    tracker, ranks = RankTracker(prior), np.empty(indices.shape, np.int64)
    for token, used in enumerate(indices):
        ranks[token] = tracker.ranks()[used]
        tracker.observe(used)
    return ranks
