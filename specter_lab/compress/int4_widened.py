"""INT4 codes of a small model as those of the widened one (`models.widen`): repeated, with their scales divided like the weights.

Copies that are summed over have shares that are powers of two, and a group of the widened model holds copies of one group with
one share. So its codes are the small model's, its scales those times the share, and both drafts compute the same function, but
for the rounding of scales below 6e-5, where FP16 is no finer than 6e-8.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from specter_lab.compress.grid import group_of
from specter_lab.compress.int4 import Int4Bank, Int4Weights, pack, unpack
from specter_lab.errors import UserError
from specter_lab.models.widen import Axis


def widened(bank: Int4Bank, grown: Mapping[str, Axis]) -> Int4Bank:
    """The bank of a small model grown along `models.widen.axes`.

    Raises:
        UserError: a group of the widened model would need two scales.
    """
    hidden, width = grown["hidden"], grown["expert"]
    gate, up = (_widened(part, width.source, hidden) for part in (bank.gate, bank.up))
    return Int4Bank(bank.layer, gate, up, _widened(bank.down, hidden.source, width))


def _widened(part: Int4Weights, rows: Tensor, inputs: Axis) -> Int4Weights:
    """Copies of rows [out'] and of inputs [in'], which are summed over."""
    small_group = 2 * part.packed.shape[2] // part.scales.shape[2]
    size = group_of(len(inputs.source))
    groups, shares = (
        each.unflatten(0, (-1, size)) for each in (inputs.source // small_group, inputs.share)
    )  # [G', size]
    if (groups != groups[:, :1]).any() or (shares != shares[:, :1]).any():
        raise UserError(f"groups of {size} inputs of the widened model hold several of the small one's: draft with int4, which rounds "
                        f"the widened weights themselves")  # fmt: skip
    scales = (part.scales[:, :, groups[:, 0]].float() * shares[:, 0]).half()  # [E, out, G']
    packed = pack(unpack(part.packed)[:, :, inputs.source])  # the small side first: rows are copied as wholes
    return Int4Weights(packed[:, rows], scales[:, rows])
