"""Reading a store: past the page cache (O_DIRECT), through it, or through it with its pages dropped first.

Buffers are page-aligned memory; bytes and seconds are counted at the call.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np

from specter_lab.engine.pages import own_pages
from specter_lab.engine.store.layout import PAGE, padded
from specter_lab.errors import UserError

DIRECT, BUFFERED = "direct", "buffered"
MODES = (DIRECT, BUFFERED)
_libc = ctypes.CDLL(None, use_errno=True)


class PagedMemory:
    """One slab of page-aligned memory, all of it there from the start, handed out in pieces: [n] uint8 arrays."""

    def __init__(self, num_bytes: int) -> None:
        try:
            self._slab = own_pages(max(padded(num_bytes), PAGE))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"{num_bytes / 1e9:.2f} GB of memory were asked for and refused: give a smaller budget"
            ) from error
        self._bytes = np.frombuffer(self._slab, np.uint8)
        self._bytes.fill(0)  # page faults happen here, not in the first reads
        self._used = 0

    def take(self, num_bytes: int) -> np.ndarray:
        """The next piece, from a page boundary on. Raises ValueError when the slab is used up."""
        end = self._used + padded(num_bytes)
        if end > len(self._bytes):
            raise ValueError(
                f"the slab of {len(self._bytes):,} bytes is used up: {self._used:,} taken, {num_bytes:,} asked"
            )
        piece = self._bytes[self._used : self._used + num_bytes]
        self._used = end
        return piece


class Reader:
    """One file of a store, read by any number of threads.

    Raises:
        UserError: no such file or mode, or the file system has no O_DIRECT.
    """

    def __init__(self, path: Path, mode: str) -> None:
        if mode not in MODES:
            raise UserError(f"a store is read in mode {' or '.join(MODES)}, not '{mode}'")
        flags = os.O_RDONLY | (os.O_DIRECT if mode == DIRECT else 0)
        try:
            self._file = os.open(path, flags)
        except OSError as error:
            raise UserError(f"cannot open {path} in mode {mode} ({error.strerror}): try the other mode") from error
        self.path, self.mode = path, mode
        self._lock = threading.Lock()
        self.read_bytes = 0
        self.read_s = 0.0

    def read_into(self, buffer: np.ndarray, offset: int) -> None:
        """Fill `buffer` [n] uint8 (whole pages, page-aligned) from `offset` (a page boundary) on.

        Raises:
            OSError: the disk failed, or the file ends before the buffer is full.
        """
        start, done = time.perf_counter(), 0
        view = memoryview(buffer)
        while done < len(view):
            count = os.preadv(self._file, [view[done:]], offset + done)
            if count == 0:
                raise OSError(f"{self.path.name} ends at byte {offset + done:,}")
            done += count
        with self._lock:
            self.read_bytes += done
            self.read_s += time.perf_counter() - start

    def drop_pages(self) -> None:
        """Ask the system to forget the file's pages, as far as they are clean."""
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._file)


class Mapping:
    """A file mapped into memory, to be used in place where its pages are resident."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # PyTorch wants it writable
        self.bytes = np.frombuffer(self._map, np.uint8)
        self._base = self.bytes.ctypes.data

    def resident(self, offset: int, num_bytes: int) -> bool:
        """Whether every page of a run (from a page boundary on) is in the page cache; reads nothing."""
        pages = padded(num_bytes) // PAGE
        flags = np.zeros(pages, np.uint8)
        length = min(num_bytes, len(self.bytes) - offset)
        address, target = ctypes.c_void_p(self._base + offset), flags.ctypes.data_as(ctypes.c_void_p)
        if _libc.mincore(address, ctypes.c_size_t(length), target) != 0:
            return False
        return bool((flags & 1).all())


def drop_pages(path: Path) -> None:
    """Write back a file's dirty pages and ask the system to forget all of them."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def unmap_pages(address: int, num_bytes: int) -> None:
    """Let go of the pages of a part of a mapped file until they are used again: no mapped page is ever dropped."""
    start = address // PAGE * PAGE
    if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + num_bytes - start), mmap.MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "pages of a mapped file could not be let go")


def warm_pages(path: Path) -> None:
    """Read a file once, so that its pages are in the page cache."""
    with path.open("rb", buffering=0) as file:
        scratch = bytearray(2**24)
        while file.readinto(scratch):
            pass
