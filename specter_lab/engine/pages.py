"""Memory straight from the system, page by page."""

from __future__ import annotations

import mmap


def own_pages(num_bytes: int) -> mmap.mmap:
    """Page-aligned memory of this process, in huge pages where the system gives them: it gives none to memory that could be shared,
    which is what `mmap` maps by default, and rows of weights are then read page table by page table.

    Raises:
        OSError, ValueError, OverflowError: the system has not so much.
    """
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
