"""A pass that waits on the device for copies that are still on their way, layer by layer.

The host launches the whole pass first and copies afterwards, in layer order; behind the copies of a layer it copies the layer's
row of the address table, and then a flag. So early layers compute while those of later ones are being copied.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

LIMIT_NS = 20_000_000_000  # a copy that takes longer will never come


@triton.jit
def _await(flag, waited, LIMIT: tl.constexpr):
    began = globaltimer()
    now = began
    come = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (come == 0) & (now - began < LIMIT):
        come = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        now = globaltimer()
    tl.store(flag, 0)
    tl.store(waited, tl.load(waited) + (now - began))
    if come == 0:
        tl.store(waited + 1, 1)


def await_flag(flag: Tensor, waited: Tensor) -> None:
    """Wait until `flag` [1] int32 is not zero, and make it zero again.

    Args:
        flag: on the device; set by a copy.
        waited: [2] int64 on the device: nanoseconds waited are added to the first, the second is set to 1 when the flag did not
            come within `LIMIT_NS`; the pass then goes on with whatever it finds.
    """
    _await[(1,)](flag, waited, LIMIT=LIMIT_NS, num_warps=1)
