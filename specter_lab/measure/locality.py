"""Locality of routing: what of a window's experts was used a moment ago, because a cache lives on what repeats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from specter_lab.measure.bootstrap import Interval, ratio_interval
from specter_lab.measure.explosion import used_experts
from specter_lab.measure.trace import Trace

NEVER = -1  # token index of the last use of an expert that has not been used yet


@dataclass(frozen=True)
class Share:
    """A share of expert uses, as sums over each request's windows and layers."""

    found: np.ndarray  # [R]
    needed: np.ndarray  # [R]

    def interval(self, *, seed: int = 0) -> Interval:
        """The share over all requests that have such windows, with a bootstrap interval over them.

        Raises:
            UserError: fewer than two requests have such windows.
        """
        some = self.needed > 0
        return ratio_interval(self.found[some], self.needed[some], seed=seed)


def window_reuse(trace: Trace, window: int, lookback: int = 1) -> Share:
    """Share of a window's distinct experts that the `lookback` windows before it used; windows do not overlap."""
    found, needed = np.zeros(len(trace.request_ids)), np.zeros(len(trace.request_ids))
    for request, used in _by_request(trace):
        windows = _windows(used, window)  # [W, L, E]
        for i in range(lookback, len(windows)):
            before = windows[i - lookback : i].any(axis=0)  # [L, E]
            found[request] += (windows[i] & before).sum()
            needed[request] += windows[i].sum()
    return Share(found, needed)


def uniform_reuse(num_experts: int, top_k: int, tokens: int) -> float:
    """Share of experts found again within `tokens` earlier tokens if routing were uniform: 1 - (1 - k/E)^tokens."""
    return 1 - (1 - top_k / num_experts) ** tokens


def lru_residents(trace: Trace, window: int, slots: int) -> Share:
    """Share of a window's distinct experts that an LRU cache of `slots` experts per layer holds when it starts.

    The cache has seen all earlier tokens of the request; it starts empty, so the first window is not counted. Of the
    experts of one token, the higher-numbered counts as used later.
    """
    found, needed = np.zeros(len(trace.request_ids)), np.zeros(len(trace.request_ids))
    for request, used in _by_request(trace):
        last_use = last_uses(used)  # [T + 1, L, E]
        for i, wanted in enumerate(_windows(used, window)[1:], start=1):
            found[request] += (wanted & lru_held(last_use[i * window], slots)).sum()
            needed[request] += wanted.sum()
    return Share(found, needed)


def reuse_distances(trace: Trace) -> np.ndarray:
    """Tokens since the same request last used the same expert in the same layer: [T, L, k] int32, 0 for a first use."""
    distances = np.zeros(trace.indices.shape, dtype=np.int32)
    for request, used in _by_request(trace):
        rows = trace.request_index == request
        before = last_uses(used)[:-1]  # [T, L, E]
        last = np.take_along_axis(before, trace.indices[rows].astype(np.int64), axis=-1)  # [T, L, k]
        distances[rows] = np.where(last == NEVER, 0, np.arange(len(used))[:, None, None] - last)
    return distances


def _by_request(trace: Trace) -> Iterator[tuple[int, np.ndarray]]:
    """(request, experts used by its tokens [T, L, E] bool) for every request that has tokens."""
    used = used_experts(trace)
    requests, starts = np.unique(trace.request_index, return_index=True)
    yield from zip(requests, np.split(used, starts[1:]))


def _windows(used: np.ndarray, size: int) -> np.ndarray:
    """Experts of consecutive windows of `size` tokens, the incomplete last one left out: [T, L, E] -> [W, L, E]."""
    count = len(used) // size
    return used[: count * size].reshape(count, size, *used.shape[1:]).any(axis=1)


def last_uses(used: np.ndarray) -> np.ndarray:
    """Token that last used each expert before token t, for t = 0 .. T: [T, L, E] -> [T + 1, L, E]."""
    uses = np.where(used, np.arange(len(used))[:, None, None], NEVER)
    first = np.full((1, *used.shape[1:]), NEVER)
    return np.concatenate([first, np.maximum.accumulate(uses, axis=0)])


def lru_held(last_use: np.ndarray, slots: int) -> np.ndarray:
    """Experts that an LRU cache of `slots` per layer, at least 1, holds after these last uses: [..., E] -> bool."""
    if slots < 1:
        raise ValueError(f"a cache of {slots} slots holds nothing")
    newest = np.argsort(last_use, axis=-1, kind="stable")[..., -slots:]
    held = np.zeros(last_use.shape, dtype=bool)
    np.put_along_axis(held, newest, True, axis=-1)
    return held & (last_use != NEVER)
