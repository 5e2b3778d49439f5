"""BF16 experts on the host's cores: rows are read once, in the order they lie in, which is what memory bandwidth allows.

Matrix libraries repack BF16 weights before they multiply, at every call; for a handful of tokens that costs more than the
product. Where an expert has more tokens, two rows meet four of them at a time, so that a weight is converted once for four
products: the last bits of a token's row depend on how many others use the expert. Sums are float32, and so is what lies between gate,
up and down.
"""

from __future__ import annotations

import numba
import numpy as np

ROWS = 8  # weight rows that are dealt out together: few enough that one expert alone keeps 16 cores equally busy


@numba.njit(parallel=True, fastmath=True, cache=True, nogil=True)
def expert_rows(
    blocks: np.ndarray, experts: np.ndarray, used: np.ndarray, x: np.ndarray, weights: np.ndarray, act: np.ndarray,
    rows: np.ndarray, done: np.ndarray,
) -> None:  # fmt: skip
    """rows[pair] = weight * down(silu(gate x) * up x), for the pairs (one token's use of one expert) of some experts.

    Args:
        blocks: [E, 3 I H] uint16, bits of BF16: gate and up [2I, H], then down [H, I] of every expert; H even.
        experts: [n].
        used: [T, k] experts of every token; pair is token * k + choice.
        x: [T, H] float32.
        weights: [T, k] float32.
        act: [T * k, I] float32, room for what lies between.
        rows: [T * k, H] float32.
        done: [T * k] uint8, set: 1 for those pairs, 0 for others.
    """
    hidden, width, count = x.shape[1], act.shape[1], len(experts)
    of_width, of_hidden = (width + ROWS - 1) // ROWS, (hidden + ROWS - 1) // ROWS
    first, pairs = _pairs_of(experts, used, done)
    tokens, of_pair = pairs // used.shape[1], weights.ravel()
    # Work is dealt out row block by row block, so that every thread has a share of each expert: some have many tokens.
    for work in numba.prange(count * of_width):
        which, start = work % count, work // count * ROWS
        block, end = blocks[experts[which]], first[which + 1]
        for row in range(start, min(start + ROWS, width)):
            gate = block[row * hidden : (row + 1) * hidden]
            up = block[(width + row) * hidden : (width + row + 1) * hidden]
            i = first[which]
            while i + 4 <= end:
                g, u = _four(gate, up, x[tokens[i]], x[tokens[i + 1]], x[tokens[i + 2]], x[tokens[i + 3]])
                for j in range(4):
                    act[i + j, row] = _gated(g[j], u[j])
                i += 4
            while i < end:
                of_token = x[tokens[i]]
                act[i, row] = _gated(_dot(gate, of_token), _dot(up, of_token))
                i += 1
    for work in numba.prange(count * of_hidden):
        which, start = work % count, work // count * ROWS
        block, end = blocks[experts[which]][2 * width * hidden :], first[which + 1]
        for row in range(start, min(start + ROWS, hidden), 2):
            down, following = block[row * width : (row + 1) * width], block[(row + 1) * width : (row + 2) * width]
            i = first[which]
            while i + 4 <= end:
                d, f = _four(down, following, act[i], act[i + 1], act[i + 2], act[i + 3])
                for j in range(4):
                    pair = pairs[i + j]
                    rows[pair, row], rows[pair, row + 1] = of_pair[pair] * d[j], of_pair[pair] * f[j]
                i += 4
            while i < end:
                pair, of_token = pairs[i], act[i]
                rows[pair, row] = of_pair[pair] * _dot(down, of_token)
                rows[pair, row + 1] = of_pair[pair] * _dot(following, of_token)
                i += 1


@numba.njit(cache=True)
def _pairs_of(experts: np.ndarray, used: np.ndarray, done: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each expert's pairs begin [n + 1], and the pairs [P], expert by expert; notes them in `done`."""
    first, pairs, flat = np.zeros(len(experts) + 1, np.int64), np.empty(used.size, np.int64), used.ravel()
    done[:], found = 0, 0
    for which in range(len(experts)):
        for pair in range(used.size):
            if flat[pair] == experts[which]:
                pairs[found], done[pair] = pair, 1
                found += 1
        first[which + 1] = found
    return first, pairs[:found]


@numba.njit(fastmath=True, cache=True)
def _four(
    one: np.ndarray, other: np.ndarray, t: np.ndarray, u: np.ndarray, v: np.ndarray, w: np.ndarray
) -> tuple[tuple[np.float32, ...], tuple[np.float32, ...]]:
    """Products of each of two weight rows with four tokens."""
    a_t = a_u = a_v = a_w = b_t = b_u = b_v = b_w = np.float32(0)
    for i in range(len(one)):
        a, b = _value(one[i]), _value(other[i])
        a_t += a * t[i]
        a_u += a * u[i]
        a_v += a * v[i]
        a_w += a * w[i]
        b_t += b * t[i]
        b_u += b * u[i]
        b_v += b * v[i]
        b_w += b * w[i]
    return (a_t, a_u, a_v, a_w), (b_t, b_u, b_v, b_w)


@numba.njit(fastmath=True, cache=True)
def _dot(bits: np.ndarray, x: np.ndarray) -> np.float32:
    total = np.float32(0)
    for i in range(len(bits)):
        total += _value(bits[i]) * x[i]
    return total


@numba.njit(cache=True)
def _value(bits: int) -> np.float32:
    """Of a BF16."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@numba.njit(fastmath=True, cache=True)
def _gated(gate: np.float32, up: np.float32) -> np.float32:
    """silu(gate) * up."""
    return gate / (np.float32(1) + np.exp(-gate)) * up
