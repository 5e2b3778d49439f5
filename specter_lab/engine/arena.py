"""Memory the engine holds, in bytes: one exactly sized pinned slab on the host, and a budget for everything on the device.

PyTorch's pinned allocator rounds up to powers of two, so 84 GB of Phi's experts would ask for 128; here the slab is mapped at its
size and registered with the driver, in pieces by several threads (a single one pins at about 1 GB/s).
"""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specter_lab.errors import UserError

PIECE_BYTES = 2**30  # registered at once
PIN_THREADS = 8
HOST_REGISTER_FLAGS = 0


@dataclass
class Budget:
    """Bytes of device memory that may be used, and by what they are."""

    total_bytes: int
    taken: dict[str, int] = field(default_factory=dict)

    @property
    def left_bytes(self) -> int:
        return self.total_bytes - sum(self.taken.values())

    def take(self, what: str, num_bytes: int, way_out: str) -> None:
        """Charge `num_bytes` to `what`.

        Raises:
            UserError: they are not left; the message lists what has been taken.
        """
        if num_bytes > self.left_bytes:
            held = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in self.taken.items()) or "nothing"
            raise UserError(
                f"{what} needs {num_bytes / 2**30:.2f} GiB of GPU memory, {self.left_bytes / 2**30:.2f} of "
                f"{self.total_bytes / 2**30:.2f} are left ({held}): {way_out}"
            )
        self.taken[what] = self.taken.get(what, 0) + num_bytes


def host_slab(num_bytes: int, *, pinned: bool) -> Tensor:
    """[num_bytes] uint8 of host memory, page aligned; pinned when a GPU is to read it.

    Raises:
        UserError: the system or the driver refuses; the message says how many bytes were granted.
    """
    try:
        mapped = mmap.mmap(-1, num_bytes)
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"the system has no {num_bytes / 2**30:.1f} GiB of host memory for the experts ({error}): close "
                        f"other programs, or use a machine with more") from error  # fmt: skip
    slab = torch.frombuffer(mapped, dtype=torch.uint8)
    if pinned:
        _pin(slab)
    return slab


def _pin(slab: Tensor) -> None:
    driver, pieces = torch.cuda.cudart(), range(0, slab.nbytes, PIECE_BYTES)

    def register(start: int) -> int:
        size = min(PIECE_BYTES, slab.nbytes - start)
        slab[start : start + size : mmap.PAGESIZE].zero_()  # first touch here, so that pages are there to be pinned
        return int(driver.cudaHostRegister(slab.data_ptr() + start, size, HOST_REGISTER_FLAGS))

    with ThreadPoolExecutor(PIN_THREADS) as pool:
        codes = list(pool.map(register, pieces))
    if any(codes):
        granted = sum(code == 0 for code in codes) * PIECE_BYTES
        for start, code in zip(pieces, codes):
            if code == 0:
                driver.cudaHostUnregister(slab.data_ptr() + start)
        raise UserError(
            f"the driver pinned {granted / 2**30:.0f} of {slab.nbytes / 2**30:.0f} GiB of host memory (error {max(codes)}): "
            f"raise the limit of locked memory (ulimit -l), or use a machine with more"
        )
