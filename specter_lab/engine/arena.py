"""Memory the engine holds, in bytes: one exactly sized pinned slab on the host, and a budget for everything on the device.

PyTorch's pinned allocator rounds up to powers of two, so 84 GB of Phi's experts would ask for 128; here the slab is mapped at its
size and registered with the driver.
"""

from __future__ import annotations

import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specter_lab.engine.pages import own_pages
from specter_lab.errors import UserError

PIECE_BYTES = 2**28  # touched by one thread at a time
TOUCH_THREADS = 8
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
        mapped = own_pages(num_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"the system has no {num_bytes / 2**30:.1f} GiB of host memory for the experts ({error}): close "
                        f"other programs, or use a machine with more") from error  # fmt: skip
    slab = torch.frombuffer(mapped, dtype=torch.uint8)
    if pinned:
        _pin(slab)
        weakref.finalize(mapped, _unpin, slab.data_ptr())  # before its addresses can be given to another
    return slab


def _pin(slab: Tensor) -> None:
    """Register the slab with the driver, whole, so that one copy may cross it anywhere; its pages are touched first, by
    several threads, because a registration that has to find them does so at about 1 GB/s."""

    def touch(start: int) -> None:
        slab[start : start + PIECE_BYTES : mmap.PAGESIZE].zero_()

    with ThreadPoolExecutor(TOUCH_THREADS) as pool:
        list(pool.map(touch, range(0, slab.nbytes, PIECE_BYTES)))
    code = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, HOST_REGISTER_FLAGS))
    if code:
        raise UserError(f"the driver did not pin {slab.nbytes / 2**30:.1f} GiB of host memory (error {code}): raise the limit "
                        f"of locked memory (ulimit -l), or use a machine with more")  # fmt: skip


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
