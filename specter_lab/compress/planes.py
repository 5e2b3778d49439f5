"""Exponents in three bit planes: a codec whose decompression is a few vector operations per weight.

The exponents of a layer's weights lie in a narrow window: eight neighbouring values hold 98.8 % of Gaussian ones. Those are
written as 3 bits, counted from the window's first value; all others are exceptions, two bytes each. So 3.2 bits are left of
8 where a Huffman code leaves 2.6, and decompression takes a quarter of the time or less. Where cores are few and the disk
is fast, that is the better bargain.

    header      n, exceptions: uint32; first value of the window: uint8
    planes      per block of 4096 exponents: bit 0 of all, bit 1, bit 2, 512 bytes each; bit i of byte j is exponent 512 i + j
    counts      exceptions per group of 128 exponents, a byte each
    exceptions  place in its group, a byte each; then the exponents, a byte each

Any bytes come back. Those that fill no window grow to as much as 2.5 times their size; fewer than three blocks, to more than
that, because the last block is filled up: one byte becomes 1577.
"""

from __future__ import annotations

import struct

import numpy as np

from specter_lab.compiled import compiled
from specter_lab.compress.recovery import recover

HEADER = struct.Struct("<IIB")
WINDOW, BITS = 8, 3
BLOCK, GROUP = 4096, 128  # exponents
PLANE, GROUPS = BLOCK // 8, BLOCK // GROUP  # of a block: bytes of a plane, groups
DISORDER = "the exceptions of bit planes do not fit their counts"


def compress(data: bytes) -> bytes:
    """The bytes of n exponents -> header, planes, counts, exceptions."""
    exponents = np.frombuffer(data, np.uint8)
    n, blocks = len(exponents), -(-len(exponents) // BLOCK)
    counted = np.bincount(exponents, minlength=256)
    first = int(np.convolve(counted, np.ones(WINDOW, np.int64), "valid").argmax())
    codes = np.zeros(blocks * BLOCK, np.uint8)
    codes[:n] = exponents - np.uint8(first)  # below the window they wrap around
    outside = np.flatnonzero(codes >= WINDOW)
    codes[outside] = 0
    bits = codes.reshape(blocks, 1, 8, PLANE) >> np.arange(BITS, dtype=np.uint8)[:, None, None] & 1
    planes = np.packbits(bits, axis=2, bitorder="little")  # [blocks, 3, 1, 512]
    counts = np.bincount(outside // GROUP, minlength=blocks * GROUPS).astype(np.uint8)
    places = (outside % GROUP).astype(np.uint8)
    parts = (planes, counts, places, exponents[outside])
    return HEADER.pack(n, len(outside), first) + b"".join(part.tobytes() for part in parts)


def decompress(data: bytes, size: int) -> np.ndarray:
    """The [size] uint8 exponents that were compressed.

    Raises:
        ValueError: lengths, counts, places or the window do not fit, or the data hold another number of exponents. What flips
            within planes and values is not seen here: a store has checksums.
    """
    parts = _parts(data, size)
    out = np.empty(-(-size // BLOCK) * BLOCK, np.uint8)
    if not _exponents(*parts, out):
        raise ValueError(DISORDER)
    return out[:size]


def decompress_and_recover(data: bytes, sign_mantissa: np.ndarray, out: np.ndarray) -> None:
    """BF16 patterns at once: compressed exponents and [n] uint8 -> out [n] uint16; a block's exponents stay in the cache.

    Raises:
        ValueError: as in `decompress`, or fields and patterns differ in length.
    """
    if len(sign_mantissa) != len(out):
        raise ValueError(f"{len(sign_mantissa)} bytes of sign and mantissa for {len(out)} patterns")
    if not _patterns(*_parts(data, len(out)), sign_mantissa, out):
        raise ValueError(DISORDER)


def _parts(data: bytes, size: int) -> tuple[np.ndarray, np.uint8, np.ndarray, np.ndarray, np.ndarray]:
    """Planes, first value of the window, counts, places and values of exceptions."""
    stored = np.frombuffer(data, np.uint8)
    if len(stored) < HEADER.size:
        raise ValueError("bit planes without their header")
    n, exceptions, first = HEADER.unpack(stored[: HEADER.size].tobytes())
    blocks, edges = -(-n // BLOCK), [HEADER.size]
    for length in (blocks * BITS * PLANE, blocks * GROUPS, exceptions, exceptions):
        edges.append(edges[-1] + length)
    if n != size or edges[-1] != len(stored):
        raise ValueError(f"{size} exponents were expected, here are {n} in {len(stored)} of {edges[-1]} bytes")
    if first > 256 - WINDOW:
        raise ValueError(f"a window of {WINDOW} values cannot begin at {first}")
    planes, counts, places, values = (stored[a:b] for a, b in zip(edges, edges[1:]))
    return planes, np.uint8(first), counts, places, values


@compiled
def _exponents(planes, first, counts, places, values, out):
    """Fill out [blocks x 4096] uint8; False: counts and places are out of order."""
    k = 0
    for block in range(len(out) // BLOCK):
        k = _block(planes, first, counts, places, values, k, block, out[block * BLOCK : (block + 1) * BLOCK])
        if k < 0:
            return False
    return k == len(places)


@compiled
def _patterns(planes, first, counts, places, values, sign_mantissa, out):
    """Fill out [n] uint16; False: counts and places are out of order."""
    k, exponents = 0, np.empty(BLOCK, np.uint8)
    for block in range(len(counts) // GROUPS):
        k = _block(planes, first, counts, places, values, k, block, exponents)
        if k < 0:
            return False
        begin, end = block * BLOCK, min(len(out), (block + 1) * BLOCK)
        recover(sign_mantissa[begin:end], exponents[: end - begin], out[begin:end])
    return k == len(places)


@compiled
def _block(planes, first, counts, places, values, k, block, out):
    """One block's exponents, out [4096] uint8, whose exceptions begin at k; where the next block's do, -1: out of order."""
    one, two, at = np.uint8(1), np.uint8(2), block * BITS * PLANE
    low, middle, high = planes[at : at + PLANE], planes[at + PLANE : at + 2 * PLANE], planes[at + 2 * PLANE :]
    for i in range(8):
        shift = np.uint8(i)
        part = out[i * PLANE : (i + 1) * PLANE]
        for j in range(PLANE):
            upper = ((middle[j] >> shift) & one) << one | ((high[j] >> shift) & one) << two
            part[j] = np.uint8(first + ((low[j] >> shift) & one | upper))
    for group in range(GROUPS):
        for _ in range(counts[block * GROUPS + group]):
            if k == len(places) or places[k] >= GROUP:
                return -1
            out[group * GROUP + int(places[k])] = values[k]
            k += 1
    return k
