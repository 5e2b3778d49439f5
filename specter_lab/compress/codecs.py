"""Byte codecs for exponents, by name: LZ4, LZ4HC and ZSTD of the `lz4` and `zstandard` packages, bit planes, and none.

    none                 the bytes as they are
    lz4                  LZ4 block
    lz4hc[-LEVEL]        LZ4 block, high compression (level 9 unless given)
    zstd[-LEVEL]         ZSTD frame (level 1 unless given: smaller and faster than 3 and 9 on exponents of weights)
    huffman              ZSTD frame whose match finder is turned down until it finds nothing in weights
    planes               three bit planes and exceptions (`compress.planes`): experts a fifteenth larger than with
                         `huffman`, decompressed in a quarter of the time or less

Exponents of neighbouring weights are almost independent, so there is nothing to match: what an entropy coder leaves is all
that can be had. LZ4 has none, and ZSTD's short chance matches cost more than they save. With `huffman` a frame holds
Huffman-coded literals and hardly any sequence; any ZSTD reads it. (Setting ZSTD's "target length" would say so too, but it
turns the Huffman coder off as well.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import lz4.block
import numpy as np
import zstandard

from specter_lab.compress import planes
from specter_lab.errors import UserError

CODECS = ("none", "lz4", "lz4hc", "zstd", "huffman", "planes")
LEVELS = {"lz4hc": (9, 1, 12), "zstd": (1, -7, 22)}  # default, smallest, largest
DAMAGE = (lz4.block.LZ4BlockError, zstandard.ZstdError)  # raised where data are damaged or of another size
_local = threading.local()  # a ZSTD context serves one thread at a time


@dataclass(frozen=True)
class Codec:
    """Both directions of one codec; its calls release the interpreter's lock."""

    name: str  # as given, with the level
    compress: Callable[[bytes], bytes]
    # Compressed bytes (or a view of them), size of what comes out.
    decompress: Callable[[bytes, int], bytes | np.ndarray]
    # Decompresses and recovers at once (`bitfield`); None: the codec cannot.
    recover: Callable[[bytes, np.ndarray, np.ndarray], None] | None = None


def codec(name: str) -> Codec:
    """The codec of that name.

    Raises:
        UserError: no such codec, or a level it does not have.
    """
    kind, _, text = name.partition("-")
    if kind not in CODECS:
        raise UserError(
            f"no codec '{name}': give one of {', '.join(CODECS)}, with a level as in zstd-3 where it has any"
        )
    if kind not in LEVELS:
        if text:
            raise UserError(f"{kind} has no levels: write '{kind}' instead of '{name}'")
        return Codec(kind, *PLAIN[kind])
    default, least, most = LEVELS[kind]
    try:
        level = int(text) if text else default
    except ValueError:
        level = most + 1
    if not least <= level <= most or (kind == "zstd" and level == 0):
        raise UserError(
            f"'{name}' is not a level of {kind}: give {kind}{least if least < 0 else f'-{least}'} to {kind}-{most}"
        )
    if kind == "lz4hc":
        return Codec(f"lz4hc-{level}", lambda data: _lz4hc(data, level), _unlz4)
    return Codec(f"zstd-{level}", zstandard.ZstdCompressor(level=level).compress, _unzstd)


def _copy(data: bytes, _size: int) -> bytes:
    return data


def _lz4(data: bytes) -> bytes:
    return lz4.block.compress(data, store_size=False)


def _lz4hc(data: bytes, level: int) -> bytes:
    return lz4.block.compress(data, mode="high_compression", compression=level, store_size=False)


def _unlz4(data: bytes, size: int) -> bytes:
    return lz4.block.decompress(data, uncompressed_size=size)


def _huffman(data: bytes) -> bytes:
    how = zstandard.ZstdCompressionParameters(
        window_log=17, hash_log=6, chain_log=6, min_match=7, strategy=zstandard.STRATEGY_FAST
    )
    return zstandard.ZstdCompressor(compression_params=how).compress(data)


def _unzstd(data: bytes, size: int) -> bytes:
    if not hasattr(_local, "zstd"):
        _local.zstd = zstandard.ZstdDecompressor()
    return _local.zstd.decompress(data, max_output_size=size)


PLAIN = {  # without levels
    "none": (bytes, _copy), "lz4": (_lz4, _unlz4), "huffman": (_huffman, _unzstd),
    "planes": (planes.compress, planes.decompress, planes.decompress_and_recover),
}  # fmt: skip
