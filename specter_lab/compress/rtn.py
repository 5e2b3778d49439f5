"""Round-to-nearest, the control: no calibration, every weight rounded by itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor

from specter_lab.compress.experts_only import experts_only
from specter_lab.compress.gptq_checkpoint import write_gptq
from specter_lab.compress.grid import GROUP, CodedBank, round_to_nearest
from specter_lab.compress.quantizer import Outcome, Quantizer
from specter_lab.models.experts import ExpertBank, read_banks
from specter_lab.models.load import LoadedModel


def quantize_bank(bank: ExpertBank, bits: int, group: int = GROUP) -> CodedBank:
    """Round the experts of one layer to `bits` bits (2, 3, 4 or 8), symmetric, one FP16 scale per (row, group).

    Raises:
        TypeError: `bank` is not an `ExpertBank`.
        UserError: a row is not a whole number of groups.
    """
    bank = experts_only(bank)
    gate, up, down = (round_to_nearest(weights, bits, group) for weights in (bank.gate, bank.up, bank.down))
    return CodedBank(bank.layer, gate, up, down)


def _write(source: LoadedModel, _ids: Tensor, folder: Path, *, bits: int) -> Outcome:
    banks = (quantize_bank(bank, bits) for bank in read_banks(source.model))
    write_gptq(source, banks, bits, GROUP, "specter_lab round-to-nearest", folder)
    return Outcome(None, ())


QUANTIZERS = tuple(
    Quantizer(f"rtn-int{bits}", bits, {"group": GROUP, "symmetric": True}, ("torch",), partial(_write, bits=bits))
    for bits in (8, 4, 3, 2)
)
