"""What earlier prompts tell about a model's experts: long-term shares per layer, and use by causal rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specter_lab.plan.zipmoe.ranks import RankTracker, bernoulli_weights, inclusion


@dataclass(frozen=True)
class Popularity:
    """Use of the experts of all layers."""

    shares: np.ndarray  # [L, E] of long-term use, rows sum to 1
    rank_hits: np.ndarray  # [E] uses of the expert that had rank r at the time, all layers

    def weights(self, active: int) -> np.ndarray:
        """[E] conditional-Bernoulli odds by rank when `active` experts of a layer are needed."""
        return _weights(tuple(self.rank_hits.tolist()), active)


@lru_cache(maxsize=32)
def _weights(rank_hits: tuple[float, ...], active: int) -> np.ndarray:
    return bernoulli_weights(inclusion(np.array(rank_hits), active), active)


def uniform(layers: int, experts: int) -> Popularity:
    """Nothing is known: every expert and every rank alike."""
    return Popularity(np.full((layers, experts), 1 / experts), np.ones(experts))


def observed(indices: np.ndarray, num_experts: int) -> Popularity:
    """Popularity from routing, tokens in the order in which they were decoded.

    Args:
        indices: [T, L, k] experts used.
    """
    layers = indices.shape[1]
    counts = np.stack([np.bincount(indices[:, i].ravel(), minlength=num_experts) for i in range(layers)])
    shares = (counts + 1) / (counts + 1).sum(axis=1, keepdims=True)
    hits = np.zeros(num_experts)
    for i in range(layers):
        hits += causal_rank_hits(indices[:, i], shares[i])
    return Popularity(shares, hits)


def causal_rank_hits(indices: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Uses by rank at the time: indices [T, k] of one layer -> [E]."""
    tracker, hits = RankTracker(prior), np.zeros(len(prior))
    for used in indices:
        distinct = np.unique(used)
        hits[tracker.ranks()[distinct]] += 1
        tracker.observe(distinct)
    return hits
