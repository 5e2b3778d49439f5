"""BF16 experts on the host's cores: rows are read once, in the order they lie in, which is what memory bandwidth allows.

Matrix libraries repack BF16 weights before they multiply, at every call; for a handful of tokens that costs more than the
product. Two rows of weights meet four tokens at a time, so that a weight is converted once for four products. Sums are float32,
and so is what lies between gate, up and down.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

ROWS = 8  # weight rows that are dealt out together: few enough that one expert alone keeps 16 cores equally busy

# Numba's threads and torch's are of one OpenMP: when the former start, the latter become as many.
_threads = torch.get_num_threads()
numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
torch.set_num_threads(_threads)


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
    tokens, places, of_pair = pairs // used.shape[1], np.arange(len(pairs)), weights.ravel()
    # Work is dealt out row block by row block, so that every thread has a share of each expert: some have many tokens.
    for work in numba.prange(count * of_width):
        which, start = work % count, work // count * ROWS
        begin, end = first[which], first[which + 1]
        found = np.empty((2, end - begin), np.float32)
        for row in range(start, min(start + ROWS, width)):
            _meet(blocks, experts[which], row * hidden, (width + row) * hidden, x, tokens, begin, found)
            for i in range(end - begin):
                gate, up = found[0, i], found[1, i]
                act[begin + i, row] = gate / (np.float32(1) + np.exp(-gate)) * up
    for work in numba.prange(count * of_hidden):
        which, start = work % count, work // count * ROWS
        begin, end = first[which], first[which + 1]
        found = np.empty((2, end - begin), np.float32)
        for row in range(start, min(start + ROWS, hidden), 2):
            down = (2 * hidden + row) * width
            _meet(blocks, experts[which], down, down + width, act, places, begin, found)
            for i in range(end - begin):
                pair = pairs[begin + i]
                rows[pair, row], rows[pair, row + 1] = of_pair[pair] * found[0, i], of_pair[pair] * found[1, i]


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
def _meet(
    blocks: np.ndarray, expert: int, one: int, other: int, x: np.ndarray, index: np.ndarray, begin: int, found: np.ndarray
) -> None:  # fmt: skip
    """found[0 and 1, i] = products of x[index[begin + i]] with the two weight rows of a block that begin at `one` and `other`.

    Slices are made once for all tokens, and numbered without a sign: both is what lets the loops become vector code.
    """
    length, i = x.shape[1], 0
    a_row, b_row = blocks[expert, one : one + length], blocks[expert, other : other + length]
    while i + 4 <= found.shape[1]:
        t, u, v, w = x[index[begin + i]], x[index[begin + i + 1]], x[index[begin + i + 2]], x[index[begin + i + 3]]
        a_t = a_u = a_v = a_w = b_t = b_u = b_v = b_w = np.float32(0)
        for j in range(length):
            a, b = _value(a_row[j]), _value(b_row[j])
            a_t += a * t[j]
            a_u += a * u[j]
            a_v += a * v[j]
            a_w += a * w[j]
            b_t += b * t[j]
            b_u += b * u[j]
            b_v += b * v[j]
            b_w += b * w[j]
        found[0, i], found[0, i + 1], found[0, i + 2], found[0, i + 3] = a_t, a_u, a_v, a_w
        found[1, i], found[1, i + 1], found[1, i + 2], found[1, i + 3] = b_t, b_u, b_v, b_w
        i += 4
    while i < found.shape[1]:
        t, a_t, b_t = x[index[begin + i]], np.float32(0), np.float32(0)
        for j in range(length):
            a_t += _value(a_row[j]) * t[j]
            b_t += _value(b_row[j]) * t[j]
        found[0, i], found[1, i] = a_t, b_t
        i += 1


@numba.njit(cache=True)
def _value(bits: int) -> np.float32:
    """Of a BF16."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)
