"""A model in the engine's layout: routed experts in one host slab, everything else on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from specter_lab.compress.int4 import Int4Bank, quantize_bank
from specter_lab.engine.decoder import Decoder
from specter_lab.engine.expert_math import DraftExperts
from specter_lab.engine.experts import new_host, put
from specter_lab.engine.load import checkpoint_tensors, read_decoder
from specter_lab.engine.records import Records, new_records
from specter_lab.engine.shape import Shape, shape_of
from specter_lab.models.experts import ExpertBank
from specter_lab.models.load import read_config, read_tokenizer, resolve
from specter_lab.models.originals import config_for
from specter_lab.models.widen import widened_config, widened_tensors


@dataclass(frozen=True)
class Weights:
    """A model in the engine's layout; engines of several budgets and policies may share it."""

    config: PretrainedConfig
    name: str
    shape: Shape
    host: Tensor  # [L, E, N] gate, up and down of every routed expert; pinned where a GPU reads it
    decoder: Decoder  # everything else, on the device
    tokenizer: PreTrainedTokenizerBase | None  # None: token ids only

    @property
    def device(self) -> torch.device:
        return self.decoder.embedding.device

    @cached_property
    def draft(self) -> DraftExperts:
        """The draft's INT4 experts, rounded to nearest."""
        return DraftExperts(int4_banks(self))

    @cached_property
    def records(self) -> Records:
        """The experts beside the draft's codes, for residual transport; host memory of about 9/16 of `host` more."""
        return new_records(self.host, self.draft.banks)


def load_weights(model: str, *, device: str | None = None, widen_to: str | None = None) -> Weights:
    """Read a zoo model, checkpoint folder or hub id; see `api.load`."""
    folder = resolve(model)
    config, tensors = read_config(folder), checkpoint_tensors(folder)
    if widen_to is not None:
        small, config = config, widened_config(config, config_for(widen_to))
        tensors = widened_tensors(folder, small, config)
    tokenizer = read_tokenizer(folder, config.vocab_size)
    return new_weights(config, model, tokenizer, device, lambda host, where: read_decoder(
        config, tensors, partial(put, host), device=where, dtype=host.dtype,
    ))  # fmt: skip


def new_weights(
    config: PretrainedConfig, name: str, tokenizer: PreTrainedTokenizerBase | None, device: str | None,
    read: Callable[[Tensor, str], Decoder],
) -> Weights:  # fmt: skip
    """Weights that `read(host, device)` brings: it fills the slab [L, E, N] and returns everything else."""
    shape, device = shape_of(config), device or ("cuda" if torch.cuda.is_available() else "cpu")
    host = new_host(
        shape, torch.bfloat16 if device.startswith("cuda") else torch.float32, pinned=device.startswith("cuda")
    )
    return Weights(config, name, shape, host, read(host, device), tokenizer)


def int4_banks(weights: Weights) -> tuple[Int4Bank, ...]:
    """All routed experts, layer by layer, rounded to nearest from the host slab; on the device."""
    banks, width, hidden = [], weights.shape.expert_width, weights.shape.hidden
    for layer, blocks in enumerate(weights.host):
        gate, up, down = blocks.to(weights.device).unflatten(1, (3, -1)).unbind(1)  # [E, I * H] each
        bank = ExpertBank(layer, gate.unflatten(1, (width, hidden)), up.unflatten(1, (width, hidden)),
                          down.unflatten(1, (hidden, width)))  # fmt: skip
        banks.append(quantize_bank(bank))
    return tuple(banks)
