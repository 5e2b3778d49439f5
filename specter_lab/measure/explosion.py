"""Expert explosion: how many distinct experts a layer needs for K consecutive tokens (Specter, expert explosion).

A window is K consecutive tokens of one request, and every position starts one. Beside the measured curve stand two that
know nothing about order: experts drawn uniformly at random, and tokens that draw
independently of each other with the layer's true frequencies. What the measured curve saves against the second comes
from neighbouring tokens using the same experts, which is what a cache lives on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specter_lab.errors import UserError
from specter_lab.measure.bootstrap import Interval, ratio_interval
from specter_lab.measure.entropy import activation_counts
from specter_lab.measure.trace import Trace


@dataclass(frozen=True)
class Explosion:
    """Distinct experts in windows of K = 1 .. W tokens; requests shorter than K have no window of K."""

    distinct: np.ndarray  # [W, R, L] sum over the request's windows
    windows: np.ndarray  # [W, R] number of windows

    def mean(self, window: int, requests: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Distinct experts per window of `window` tokens, over the given requests: per layer [L]."""
        return self.distinct[window - 1, requests].sum(axis=0) / self.windows[window - 1, requests].sum()

    def interval(self, window: int, requests: np.ndarray | slice = slice(None), *, seed: int = 0) -> Interval:
        """Mean over layers and windows, with a bootstrap interval over the given requests.

        Raises:
            UserError: fewer than two of the requests are as long as the window.
        """
        windows = self.windows[window - 1, requests]  # [R]
        distinct = self.distinct[window - 1, requests].mean(axis=-1)  # [R]
        return ratio_interval(distinct[windows > 0], windows[windows > 0], seed=seed)


def distinct_experts(trace: Trace, max_window: int = 32) -> Explosion:
    """Count the distinct experts of every window of 1 .. `max_window` tokens, in every layer.

    Raises:
        UserError: no request is as long as the largest window.
    """
    requests, length = len(trace.request_ids), np.bincount(trace.request_index, minlength=len(trace.request_ids))
    if length.max() < max_window:
        raise UserError(f"no request of this trace has {max_window} tokens (the longest has {length.max()}): ask for "
                        f"smaller windows or read longer requests")  # fmt: skip
    used = used_experts(trace)  # [T, L, E]
    window = used.copy()  # [T, L, E] experts of the tokens t .. t + K - 1
    distinct = np.zeros((max_window, requests, len(trace.layers)))
    windows = np.zeros((max_window, requests), dtype=np.int64)
    for size in range(1, max_window + 1):
        starts = trace.num_tokens - size + 1
        if size > 1:
            window = window[:starts]
            window |= used[size - 1 :]
        whole = trace.request_index[:starts] == trace.request_index[size - 1 :]  # [starts]: inside one request
        rows = trace.request_index[:starts][whole]
        np.add.at(distinct[size - 1], rows, window[whole].sum(axis=-1))
        windows[size - 1] = np.bincount(rows, minlength=requests)
    return Explosion(distinct, windows)


def used_experts(trace: Trace) -> np.ndarray:
    """Which experts every token used in every layer: [T, L, E] bool."""
    used = np.zeros((trace.num_tokens, len(trace.layers), trace.num_experts), dtype=bool)
    np.put_along_axis(used, trace.indices.astype(np.int64), True, axis=-1)
    return used


def uniform_routing(num_experts: int, top_k: int, window: int) -> float:
    """Distinct experts if each token drew its k of E experts uniformly: E (1 - (1 - k/E)^K)."""
    return num_experts * (1 - (1 - top_k / num_experts) ** window)


def independent_routing(trace: Trace, window: int) -> float:
    """Distinct experts if tokens drew independently with each layer's true frequencies, mean over layers."""
    frequency = activation_counts(trace).sum(axis=0) / trace.num_tokens  # [L, E], sums to k
    return float((1 - (1 - frequency) ** window).sum(axis=-1).mean())
