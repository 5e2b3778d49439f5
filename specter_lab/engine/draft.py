"""Whose codes draft: rounded to nearest from the weights at hand, made by a quantiser, or read from a quantised checkpoint.

    none          nothing drafts
    int4          rounded to nearest from the target's own weights; needs nothing but them
    gptq-int4 ... by a quantiser of `compress.quantizers`, made once and kept in the cache (Specter, section SIC: GPTQ)
    a folder, or a hub id of a GPTQ checkpoint, as it is

All are held in one layout (`compress.int4`) and read by the same kernels. Which of them drafts changes how many tokens are
accepted, and what residual transport moves; it never changes the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm.auto import tqdm

from specter_lab import paths
from specter_lab.compress.int4 import Int4Bank, Int4Weights, dequantize_bank, quantize_bank
from specter_lab.compress.int4_stored import RoutedExperts, fits_int4, open_int4, read_int4
from specter_lab.compress.int4_widened import widened
from specter_lab.compress.quantizers import QUANTIZERS, quantized
from specter_lab.engine.shape import Shape, shape_of
from specter_lab.errors import UserError
from specter_lab.models.experts import ExpertBank
from specter_lab.models.load import read_config, resolve

if TYPE_CHECKING:
    from specter_lab.engine.weights import Weights

NONE, ROUNDED = "none", "int4"
UNLIKE = 0.5  # relative error of codes that are not these weights'; those of 4 bits miss them by about 0.1


def draft_names() -> tuple[str, ...]:
    """All names of drafts; folders and hub ids of quantised checkpoints are others."""
    return (ROUNDED, NONE, *(name for name, row in QUANTIZERS.items() if fits_int4(row)))


def prepare_draft(model: str, draft: str) -> None:
    """Have the draft's checkpoint at hand, quantised with progress if it has to be, before the model takes the memory.

    Raises:
        UserError: no such draft, one whose codes the engine cannot hold, or a quantiser that cannot run on this model.
    """
    if draft in QUANTIZERS and draft not in draft_names():
        raise UserError(f"the engine drafts with symmetric 4-bit codes in groups of 128, {draft} makes others: choose one of "
                        f"{', '.join(draft_names())}, or measure it (specter-lab measure --quantizer {draft})")  # fmt: skip
    if draft in QUANTIZERS:
        _made(model, draft, paths.CACHE / "quantized")
    elif draft not in draft_names():
        if "/" not in draft and not Path(draft).exists():
            raise UserError(
                f"no draft '{draft}': choose one of {', '.join(draft_names())}, or give a quantised checkpoint"
            )
        open_int4(draft)


@cache  # looking it up reads the whole model for its digest
def _made(model: str, quantizer: str, cache_dir: Path) -> Path:
    return quantized(model, quantizer, cache_dir)


def draft_banks(weights: Weights, draft: str) -> tuple[Int4Bank, ...]:
    """The draft's codes of all routed experts, layer by layer, on the device; a quantised checkpoint is streamed.

    Args:
        draft: any but "none", as `prepare_draft` admits it.

    Raises:
        UserError: as `read_int4`, or codes that are not of these weights.
    """
    if draft == ROUNDED:
        return tuple(quantize_bank(_bank(weights, layer)) for layer in range(len(weights.host)))
    folder = _made(weights.name, draft, paths.CACHE / "quantized") if draft in QUANTIZERS else draft
    banks: list[Int4Bank] = []
    for bank in tqdm(_stored(weights, folder), "the draft's codes", len(weights.host), unit="layer", delay=2.0):
        gate, up, down = (_on(part, weights.device) for part in (bank.gate, bank.up, bank.down))
        banks.append(Int4Bank(len(banks), gate, up, down))
        if len(banks) == 1:
            _check_alike(weights, banks[0], str(folder))
    return tuple(banks)


def _stored(weights: Weights, folder: str | Path) -> Iterator[Int4Bank]:
    """Of the model that was read; widened if that was."""
    shape = weights.shape if weights.grown is None else shape_of(read_config(resolve(weights.name)))
    for bank in read_int4(folder, _wanted(shape, weights.name)):
        yield bank if weights.grown is None else widened(bank, weights.grown)


def _wanted(shape: Shape, model: str) -> RoutedExperts:
    return RoutedExperts(model, shape.moe_layers, shape.num_experts, shape.hidden, shape.expert_width)


def _on(part: Int4Weights, device: torch.device) -> Int4Weights:
    return Int4Weights(part.packed.to(device), part.scales.to(device))


def _bank(weights: Weights, layer: int, experts: slice = slice(None)) -> ExpertBank:
    """Experts of a layer from the host slab, on the device."""
    width, hidden = weights.shape.expert_width, weights.shape.hidden
    gate, up, down = weights.host[layer, experts].to(weights.device).unflatten(1, (3, -1)).unbind(1)  # [E, I * H] each
    return ExpertBank(layer, gate.unflatten(1, (width, hidden)), up.unflatten(1, (width, hidden)),
                      down.unflatten(1, (hidden, width)))  # fmt: skip


def _check_alike(weights: Weights, bank: Int4Bank, where: str) -> None:
    """Raise UserError when the first expert's codes are not near its weights: shapes alone do not tell two models apart."""
    one = slice(0, 1)
    cut = (Int4Weights(part.packed[one], part.scales[one]) for part in (bank.gate, bank.up, bank.down))
    codes, own = dequantize_bank(Int4Bank(bank.layer, *cut)), _bank(weights, 0, one)
    for projection in ("gate", "up", "down"):
        found, expected = getattr(codes, projection), getattr(own, projection).float()
        away, size = (found - expected).norm(), expected.norm()
        if away > UNLIKE * size:
            raise UserError(f"{where} is not of {weights.name}: its codes are {away / size:.0%} away from the weights; use a checkpoint of "
                            f"this very model")  # fmt: skip
