"""BF16 experts on the host's cores: rows are read once, in the order they lie in, which is what memory bandwidth allows.

Matrix libraries repack BF16 weights before they multiply, at every call; for a handful of tokens that costs more than the
product. Sums are float32, and so is what lies between gate, up and down.
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


@numba.njit(parallel=True, fastmath=True, cache=True)
def expert_rows(
    blocks: np.ndarray, experts: np.ndarray, first: np.ndarray, pairs: np.ndarray, x: np.ndarray, top_k: int,
    weights: np.ndarray, act: np.ndarray, rows: np.ndarray,
) -> None:  # fmt: skip
    """rows[pair] = weight * down(silu(gate x) * up x), for the pairs (one token's use of one expert) of some experts.

    Args:
        blocks: [E, 3 I H] uint16, bits of BF16: gate and up [2I, H], then down [H, I] of every expert.
        experts: [n].
        first: [n + 1] where each one's pairs begin.
        pairs: [P] token * k + choice.
        x: [T, H] float32.
        weights: [T * k] float32.
        act: [T * k, I] float32, room for what lies between.
        rows: [T * k, H] float32.
    """
    hidden, width, count = x.shape[1], act.shape[1], len(experts)
    of_width, of_hidden = (width + ROWS - 1) // ROWS, (hidden + ROWS - 1) // ROWS
    # Work is dealt out row block by row block, so that every thread has a share of each expert: some have many tokens.
    for work in numba.prange(count * of_width):
        which, start = work % count, work // count * ROWS
        block = blocks[experts[which]]
        for row in range(start, min(start + ROWS, width)):
            gate = block[row * hidden : (row + 1) * hidden]
            up = block[(width + row) * hidden : (width + row + 1) * hidden]
            for i in range(first[which], first[which + 1]):
                of_token = x[pairs[i] // top_k]
                g = _dot(gate, of_token)
                act[pairs[i], row] = g / (np.float32(1) + np.exp(-g)) * _dot(up, of_token)
    for work in numba.prange(count * of_hidden):
        which, start = work % count, work // count * ROWS
        block = blocks[experts[which]][2 * width * hidden :]
        for row in range(start, min(start + ROWS, hidden)):
            down = block[row * width : (row + 1) * width]
            for i in range(first[which], first[which + 1]):
                rows[pairs[i], row] = weights[pairs[i]] * _dot(down, act[pairs[i]])


@numba.njit(fastmath=True, cache=True)
def _dot(bits: np.ndarray, x: np.ndarray) -> np.float32:
    total = np.float32(0)
    for i in range(len(bits)):
        total += np.uint32(np.uint32(bits[i]) << np.uint32(16)).view(np.float32) * x[i]
    return total
