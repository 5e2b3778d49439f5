"""How evenly the experts are used: activation heat map, normalised entropy per layer (specter-activation-entropy)."""

from __future__ import annotations

import numpy as np

from specter_lab.measure.bootstrap import Interval, resample_counts
from specter_lab.measure.trace import Trace


def activation_counts(trace: Trace) -> np.ndarray:
    """How often each request used each expert: [R, L, E] int64; its sum over requests is the heat map [L, E]."""
    requests, layers, experts = len(trace.request_ids), len(trace.layers), trace.num_experts
    row = trace.request_index.astype(np.int64)[:, None] * layers + np.arange(layers)  # [T, L]
    cell = row[..., None] * experts + trace.indices  # [T, L, k]
    return np.bincount(cell.ravel(), minlength=requests * layers * experts).reshape(requests, layers, experts)


def normalized_entropy(counts: np.ndarray) -> np.ndarray:
    """Entropy of the activation shares over log E: counts [..., E] -> [...]; 1 = all experts used equally often."""
    share = counts / counts.sum(axis=-1, keepdims=True)
    terms = -share * np.log(share, out=np.zeros_like(share), where=share > 0)
    return terms.sum(axis=-1) / np.log(counts.shape[-1])


def layer_entropy(trace: Trace, *, resamples: int = 1000, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Normalised entropy of every MoE layer [L], with a bootstrap interval over requests.

    Entropy of counts is biased downwards, and resampling adds the same bias once more, so a percentile interval may
    lie below the estimate it belongs to. The interval is therefore the *basic* one, reflected at the estimate
    (2 x estimate - quantile), cut at 1. Compare the estimate with `uniform_router_entropy` for the same sample.

    Raises:
        UserError: fewer than two requests.
    """
    counts = activation_counts(trace)  # [R, L, E]
    requests, layers, experts = counts.shape
    estimate = normalized_entropy(counts.sum(axis=0))  # [L]
    drawn = resample_counts(requests, resamples, seed)  # [B, R]
    resampled = (drawn @ counts.reshape(requests, -1)).reshape(resamples, layers, experts)
    tail = (1 - confidence) / 2
    below, above = np.quantile(normalized_entropy(resampled), (tail, 1 - tail), axis=0)  # [L] each
    return Interval(estimate, 2 * estimate - above, np.minimum(2 * estimate - below, 1.0), requests, confidence)


def uniform_router_entropy(num_tokens: int, num_experts: int, top_k: int) -> float:
    """Expected normalised entropy, after `num_tokens` tokens, of a router that picks k of E experts at random.

    Below 1 because counts scatter: an expert's count has variance T (k/E) (1 - k/E), and to second order the entropy
    falls short of log E by sum of (count - mean)^2 / (2 mean) over all k T activations = (E - k) / (2 k T) nats.
    """
    return 1 - (num_experts - top_k) / (2 * top_k * num_tokens * np.log(num_experts))
