"""Routed experts as a checkpoint stores them, whatever its format, and the check that they are the model's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from specter_lab.errors import UserError
from specter_lab.models.experts import ExpertBank, read_banks
from specter_lab.models.load import LoadedModel

PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class StoredProjection:
    """One projection of all routed experts of a layer."""

    layer: int  # decoder layer
    projection: str  # "gate", "up" or "down"
    weights: Tensor  # [E, out, in] float32, effective
    stored_bytes: int  # codes, scales and zero points on disk


@dataclass(frozen=True)
class StoredExperts:
    """What a reader found in a checkpoint; `projections` is read once, and only as far as asked."""

    quantizer: str  # by the checkpoint's own account, e.g. "gptq-int4"
    notes: tuple[str, ...]  # what else is quantised in it, and not used
    projections: Iterator[StoredProjection]


def unused_note(names: Sequence[str]) -> str:
    """The sentence about quantised tensors `names` that are not routed experts."""
    return (f"{len(names)} other quantised tensors are not used, e.g. {names[0]}: draft and target share everything "
            f"but routed experts")  # fmt: skip


def assemble(stored: StoredExperts, source: LoadedModel, where: str) -> tuple[tuple[ExpertBank, ...], int]:
    """The banks of `source`'s MoE layers with the stored weights, and their stored bytes.

    Raises:
        UserError: a layer or expert is missing, is not the model's, has another shape, or is not finite.
    """
    originals = read_banks(source.model)
    wanted = {(bank.layer, name): getattr(bank, name).shape for bank in originals for name in PROJECTIONS}
    found: dict[tuple[int, str], Tensor] = {}
    total_bytes = 0
    for item in stored.projections:
        what, shape = f"{where}: {item.projection} of layer {item.layer}", wanted.get((item.layer, item.projection))
        if shape is None:
            raise UserError(f"{what} is not in {source.name}: use a checkpoint of this very model")
        if item.weights.shape != shape:
            raise UserError(f"{what} has shape {tuple(item.weights.shape)}, {source.name} has {tuple(shape)}: use a "
                            f"checkpoint of this very model")  # fmt: skip
        if not item.weights.isfinite().all():
            raise UserError(f"{what} holds values that are not finite: the file is damaged, fetch or make it again")
        found[item.layer, item.projection] = item.weights
        total_bytes += item.stored_bytes
    if missing := sorted(wanted.keys() - found.keys()):
        layer, projection = missing[0]
        raise UserError(f"{where}: {len(missing)} expert tensors are missing, first {projection} of layer {layer}: "
                        f"this is not a whole quantised checkpoint of {source.name}")  # fmt: skip
    banks = (ExpertBank(bank.layer, *(found[bank.layer, name] for name in PROJECTIONS)) for bank in originals)
    return tuple(banks), total_bytes
