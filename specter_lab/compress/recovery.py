"""Recovery of BF16 from its bit fields: what every codec's exponents go through."""

from __future__ import annotations

import numpy as np

from specter_lab.compiled import compiled


@compiled
def recover(sign_mantissa, exponents, out):
    """Put BF16 patterns together: [n] uint8 and [n] uint8 -> out [n] uint16, all contiguous.

    A core's speed is one of the bounds beside every codec (`bench_bitfield.bounds`).

    Raises:
        ValueError: their lengths differ.
    """
    if len(sign_mantissa) != len(out) or len(exponents) != len(out):
        raise ValueError("bit fields and patterns differ in length")
    for i in range(len(out)):
        fields = np.uint16(sign_mantissa[i])
        sign = np.uint16((fields & np.uint16(0x80)) << np.uint16(8))
        out[i] = sign | np.uint16(np.uint16(exponents[i]) << np.uint16(7)) | (fields & np.uint16(0x7F))
