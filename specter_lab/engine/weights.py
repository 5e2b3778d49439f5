"""A model in the engine's layout: routed experts in one host slab, everything else on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from specter_lab.engine.decoder import Decoder
from specter_lab.engine.draft import NONE, ROUNDED, draft_banks
from specter_lab.engine.expert_math import DraftExperts
from specter_lab.engine.experts import new_host, put
from specter_lab.engine.load import checkpoint_tensors, read_decoder
from specter_lab.engine.records import Records, new_records
from specter_lab.engine.shape import Shape, shape_of
from specter_lab.models.load import read_config, read_tokenizer, resolve
from specter_lab.models.originals import config_for
from specter_lab.models.widen import Axis, axes, widened_config, widened_tensors

Made = TypeVar("Made")


@dataclass(frozen=True)
class Weights:
    """A model in the engine's layout; engines of several budgets and policies may share it."""

    config: PretrainedConfig
    name: str
    shape: Shape
    host: Tensor  # [L, E, N] gate, up and down of every routed expert; pinned where a GPU reads it
    decoder: Decoder  # everything else, on the device
    tokenizer: PreTrainedTokenizerBase | None  # None: token ids only
    grown: Mapping[str, Axis] | None = None  # of a widened model: how its axes came about
    _drafts: dict[str, DraftExperts] = field(default_factory=dict, init=False, repr=False, compare=False)
    _records: dict[str, Records] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        return self.decoder.embedding.device

    def draft(self, name: str = ROUNDED) -> DraftExperts:
        """The draft's INT4 experts by name or checkpoint (`engine.draft`); those asked for last are kept.

        Raises:
            UserError: no such draft, or one that does not fit.
        """
        if name == NONE:
            return DraftExperts((), name)
        return _kept(self._drafts, name, lambda: DraftExperts(draft_banks(self, name), name))

    def records(self, draft: str = ROUNDED) -> Records:
        """The experts beside that draft's codes, for residual transport; host memory of 9/16 of `host` or somewhat more."""
        return _kept(self._records, draft, lambda: new_records(self.host, self.draft(draft).banks))


def _kept(one: dict[str, Made], name: str, make: Callable[[], Made]) -> Made:
    """What was made last, if it has this name: two of them would take memory that no budget knows of."""
    if name not in one:
        one.clear()
        one[name] = make()
    return one[name]


def load_weights(model: str, *, device: str | None = None, widen_to: str | None = None) -> Weights:
    """Read a zoo model, checkpoint folder or hub id; see `api.load`."""
    folder = resolve(model)
    config, tensors, grown = read_config(folder), checkpoint_tensors(folder), None
    if widen_to is not None:
        small, config = config, widened_config(config, config_for(widen_to))
        tensors, grown = widened_tensors(folder, small, config), axes(small, config)
    tokenizer = read_tokenizer(folder, config.vocab_size)
    return new_weights(config, model, tokenizer, device, lambda host, where: read_decoder(
        config, tensors, partial(put, host), device=where, dtype=host.dtype,
    ), grown)  # fmt: skip


def new_weights(
    config: PretrainedConfig, name: str, tokenizer: PreTrainedTokenizerBase | None, device: str | None,
    read: Callable[[Tensor, str], Decoder], grown: Mapping[str, Axis] | None = None,
) -> Weights:  # fmt: skip
    """Weights that `read(host, device)` brings: it fills the slab [L, E, N] and returns everything else."""
    shape, device = shape_of(config), device or ("cuda" if torch.cuda.is_available() else "cpu")
    host = new_host(
        shape, torch.bfloat16 if device.startswith("cuda") else torch.float32, pinned=device.startswith("cuda")
    )
    return Weights(config, name, shape, host, read(host, device), tokenizer, grown)
