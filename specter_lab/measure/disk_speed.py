"""How fast a folder's disk is read, without what the system's page cache already holds."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from specter_lab.errors import UserError
from specter_lab.measure.host_speed import EXPERT_BYTES, Rate

READ_SIZES = (65_536, 1_048_576, EXPERT_BYTES, 134_217_728)  # multiples of BLOCK, as O_DIRECT wants them
BLOCK = 4096
CHUNK = 2**24
O_DIRECT, FADVISE = "O_DIRECT", "posix_fadvise"


@dataclass(frozen=True)
class DiskSpeed:
    """One read at a time, at random places of a file of random bytes."""

    read: tuple[Rate, ...]
    method: str  # O_DIRECT: past the page cache; FADVISE: the system was asked to forget the pages first
    size_bytes: int  # of the disk
    free_bytes: int


def measure_disk(folder: Path, *, budget_s: float = 0.6, file_bytes: int = 2**28) -> DiskSpeed:
    """Write a temporary file into `folder`, read it in pieces of READ_SIZES, remove it.

    Raises:
        UserError: the disk has no room for the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    usage = shutil.disk_usage(folder)
    if usage.free < 2 * file_bytes:
        raise UserError(
            f"{usage.free / 1e9:.2f} GB are free in {folder}, measuring the disk takes {2 * file_bytes / 1e9:.2f}: "
            f"free some space, or set SPECTER_LAB_OUT to a folder on another disk"
        )
    with tempfile.NamedTemporaryFile(dir=folder, prefix="disk-speed-") as file:
        for _ in range(file_bytes // CHUNK):
            file.write(os.urandom(CHUNK))
        file.flush()
        os.fsync(file.fileno())
        descriptor, method = _open_uncached(file.name)
        try:
            sizes = [size for size in READ_SIZES if 2 * size <= file_bytes]
            rates = tuple(Rate(size, _read_gb_s(descriptor, method, size, file_bytes, budget_s)) for size in sizes)
        finally:
            os.close(descriptor)
    return DiskSpeed(rates, method, usage.total, usage.free)


def _open_uncached(path: str) -> tuple[int, str]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (OSError, AttributeError):  # the file system, or the operating system, has no such flag
        return os.open(path, os.O_RDONLY), FADVISE
    try:
        with mmap.mmap(-1, BLOCK) as page:
            os.preadv(descriptor, [page], 0)
    except OSError:
        os.close(descriptor)
        return os.open(path, os.O_RDONLY), FADVISE
    return descriptor, O_DIRECT


def _read_gb_s(descriptor: int, method: str, size: int, file_bytes: int, budget_s: float) -> float:
    places = random.Random(size)
    times_s: list[float] = []
    end = perf_counter() + budget_s
    with mmap.mmap(-1, size) as buffer:  # begins at a page, as O_DIRECT wants it
        while len(times_s) < 3 or perf_counter() < end:
            offset = places.randrange((file_bytes - size) // BLOCK + 1) * BLOCK
            if method == FADVISE:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            start = perf_counter()
            _read_all(descriptor, buffer, offset)
            times_s.append(perf_counter() - start)
    return size / median(times_s) * 1e-9


def _read_all(descriptor: int, buffer: mmap.mmap, offset: int) -> None:
    with memoryview(buffer) as view:
        done = 0
        while done < len(view):
            with view[done:] as rest:
                count = os.preadv(descriptor, [rest], offset + done)
            if count == 0:
                raise EOFError(f"the file ends at {offset + done}")
            done += count
