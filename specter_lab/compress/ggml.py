"""ggml's own quantiser, called through the shared library that libggml-python ships."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GgmlType

from specter_lab.errors import UserError

# What llama.cpp's quantiser takes instead of a K type when a row is not a multiple of 256 (llama-quant.cpp).
FALLBACK = {
    GgmlType.Q2_K: GgmlType.IQ4_NL,
    GgmlType.Q3_K: GgmlType.IQ4_NL,
    GgmlType.Q4_K: GgmlType.Q5_0,
    GgmlType.Q5_K: GgmlType.Q5_1,
    GgmlType.Q6_K: GgmlType.Q8_0,
}


def type_for_rows(wanted: GgmlType, row: int) -> GgmlType:
    """The type that rows of `row` weights get when `wanted` is asked for: llama.cpp's rule.

    A K type that does not fit gives way to its fallback; what does not fit that either is stored in F16.
    """
    for candidate in (wanted, FALLBACK.get(wanted, wanted)):
        block, _ = GGML_QUANT_SIZES[candidate]
        if row % block == 0:
            return candidate
    return GgmlType.F16


@cache
def _library() -> ctypes.CDLL:
    spec = find_spec("libggml")
    if spec is None:
        raise UserError("GGUF types are made by ggml's own quantiser: install it with `pip install libggml-python`")
    library = ctypes.CDLL(str(next(Path(spec.submodule_search_locations[0]).glob("lib*/libggml-base.so"))))
    floats = ctypes.POINTER(ctypes.c_float)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, floats, ctypes.c_void_p, *[ctypes.c_int64] * 3, floats]
    return library


def row_bytes(kind: GgmlType, row: int) -> int:
    """Stored bytes of a row of `row` weights."""
    block, size = GGML_QUANT_SIZES[kind]
    return row // block * size


def quantize_rows(weights: np.ndarray, kind: GgmlType) -> np.ndarray:
    """[rows, n] float32 -> [rows, bytes] uint8 in ggml's block format, without importance matrix.

    Raises:
        ValueError: n is not a multiple of the type's block.
    """
    rows, n = weights.shape
    if n % GGML_QUANT_SIZES[kind][0]:
        raise ValueError(f"{kind.name} holds blocks of {GGML_QUANT_SIZES[kind][0]} weights, rows have {n}")
    if kind == GgmlType.F16:
        return weights.astype(np.float16).view(np.uint8)
    weights = np.ascontiguousarray(weights, np.float32)
    stored = np.empty((rows, row_bytes(kind, n)), np.uint8)
    source = weights.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    written = _library().ggml_quantize_chunk(int(kind), source, stored.ctypes.data, 0, rows, n, None)
    if written != stored.nbytes:
        raise RuntimeError(f"ggml wrote {written} bytes of {kind.name} where {stored.nbytes} were expected")
    return stored
