"""Putting BF16 weights together on the device: sign-mantissa and exponent bytes in, weights out (ZipMoE's recovery).

The reference beside it is `compress.bitfield.recover_reference`. Three bytes are moved per weight, so the floor is 1.5 times a
copy's of the output; a program handles a block of bytes and writes twice as many.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _recover(sign_mantissa, exponents, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    fields = tl.load(sign_mantissa + at, mask=inside, other=0).to(tl.int32)
    exponent = tl.load(exponents + at, mask=inside, other=0).to(tl.int32)
    pattern = ((fields >> 7) << 15) | (exponent << 7) | (fields & 0x7F)
    tl.store(out + at, pattern.to(tl.int16), mask=inside)


def recover(sign_mantissa: Tensor, exponents: Tensor) -> Tensor:
    """[n] uint8 and [n] uint8 on one device, contiguous -> [n] bfloat16 there.

    Raises:
        ValueError: other types, lengths or layouts.
    """
    for fields in (sign_mantissa, exponents):
        if fields.dtype != torch.uint8 or not fields.is_contiguous() or fields.shape != (len(sign_mantissa),):
            raise ValueError(f"fields are contiguous [n] uint8 of one length, not {fields.dtype} {tuple(fields.shape)}")
    out = torch.empty(len(sign_mantissa), dtype=torch.int16, device=sign_mantissa.device)
    if len(out):
        _recover[(triton.cdiv(len(out), BLOCK),)](sign_mantissa, exponents, out, len(out), BLOCK=BLOCK)
    return out.view(torch.bfloat16)
