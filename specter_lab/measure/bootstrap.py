"""Percentile bootstrap over requests: tokens of one request are not independent, requests are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specter_lab.errors import UserError


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; scalars, or arrays of one shape."""

    estimate: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n_requests: int
    confidence: float


def resample_counts(n_requests: int, resamples: int, seed: int) -> np.ndarray:
    """How often each request is drawn in each resample: [B, R], rows sum to R.

    Raises:
        UserError: fewer than two requests.
    """
    if n_requests < 2:
        raise UserError(f"a bootstrap over requests needs at least 2 of them, got {n_requests}: select more requests")
    rng = np.random.default_rng(seed)
    return rng.multinomial(n_requests, np.full(n_requests, 1 / n_requests), size=resamples).astype(np.float64)


def ratio_interval(
    numerators: np.ndarray,
    denominators: np.ndarray,
    *,
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """sum(numerators) / sum(denominators) with the percentile interval of resampled requests (cluster bootstrap).

    Args:
        numerators: per-request sums, [R] for one ratio or [R, M] for M of them.
        denominators: per-request counts, [R] or [R, M].

    Raises:
        UserError: fewer than two requests.
    """
    drawn = resample_counts(len(numerators), resamples, seed)  # [B, R]
    ratios = (drawn @ numerators) / (drawn @ denominators)  # [B] or [B, M]
    tail = (1 - confidence) / 2
    low, high = np.quantile(ratios, (tail, 1 - tail), axis=0)
    return Interval(numerators.sum(axis=0) / denominators.sum(axis=0), low, high, len(numerators), confidence)
