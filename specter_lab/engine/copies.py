"""Copies from pinned memory to the device, straight to the driver: through Torch each costs the host a tenth of the copy itself.

The link is never the host's to wait for: what it does for a layer has to end before the layer's copies do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
import torch


def copy_to_device(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: torch.cuda.Stream) -> None:
    """Begin copies, one after the other, in the order of `stream`.

    Args:
        targets: [n] addresses on the device.
        sources: [n] addresses in pinned memory, which must stay as it is until they have ended.
        sizes: [n] bytes.

    Raises:
        RuntimeError: the driver refused one.
    """
    copy, handle = _driver(), stream.cuda_stream
    for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist()):
        if error := copy(target, source, size, handle):
            raise RuntimeError(f"the driver refused a copy of {size} bytes to the device (error {error})")


@cache
def _driver() -> Callable[[int, int, int, int], int]:
    """cuMemcpyHtoDAsync, which keeps the interpreter's lock: handing it over would take longer than the call."""
    copy = ctypes.PyDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2
    copy.argtypes = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    return copy
