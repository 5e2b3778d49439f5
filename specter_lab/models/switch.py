"""Encoder-decoder MoE translators: the geometry of Elephants' model, and the experts of a Switch model as values."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specter_lab.models.stacks import stacks_of


@dataclass(frozen=True)
class SwitchGeometry:
    """An encoder-decoder whose every other layer is sparse; feed-forward layers are two matrices, as in Switch."""

    hidden: int
    ffn: int
    encoder_layers: int
    decoder_layers: int
    experts: int
    vocab: int

    @property
    def moe_layers(self) -> int:
        return self.encoder_layers // 2 + self.decoder_layers // 2

    @property
    def expert_parameters(self) -> int:
        """All routed experts of all layers."""
        return self.moe_layers * self.experts * 2 * self.hidden * self.ffn

    @property
    def other_parameters(self) -> int:
        """Tied embedding, attention, dense feed-forward layers and routers; norms are left out."""
        layers = self.encoder_layers + self.decoder_layers
        attention = 4 * self.hidden**2 * (layers + self.decoder_layers)  # a decoder layer attends twice
        dense = (layers - self.moe_layers) * 2 * self.hidden * self.ffn
        return self.vocab * self.hidden + attention + dense + self.moe_layers * self.experts * self.hidden

    def stored_bytes(self, bits: int) -> int:
        """The model with experts of 16, 8 or 4 bits a weight, the rest in 16; quantised ones have FP16 scales."""
        channels = self.moe_layers * self.experts * (self.hidden + self.ffn)
        scales = 2 * channels if bits < 16 else 0
        return self.expert_parameters * bits // 8 + 2 * self.other_parameters + scales


ELEPHANTS = SwitchGeometry(hidden=1024, ffn=4096, encoder_layers=24, decoder_layers=12, experts=32, vocab=128_000)


@dataclass(frozen=True)
class SwitchBank:
    """All routed experts of one sparse layer: wo(relu(wi x))."""

    side: str  # "encoder" or "decoder"
    layer: int
    wi: Tensor  # [E, M, N] = [experts, hidden, ffn], inputs by outputs as in the paper
    wo: Tensor  # [E, ffn, hidden]


def sparse_layers(model: PreTrainedModel) -> list[tuple[str, int, nn.Module]]:
    """(side, layer, sparse MLP module) of a Switch model, encoder first."""
    return [(block.stack, block.index, mlp) for block, mlp in stacks_of(model.config).sparse(model).items()]


def read_switch_banks(model: PreTrainedModel) -> list[SwitchBank]:
    """The experts of every sparse layer, encoder first (copied: the class keeps one linear layer per expert)."""
    return [
        SwitchBank(side, index, *(torch.stack([getattr(e, name).weight.detach().t() for e in mlp.experts.values()]) for name in ("wi", "wo")))
        for side, index, mlp in sparse_layers(model)
    ]  # fmt: skip


def with_switch_banks(model: PreTrainedModel, banks: Sequence[SwitchBank]) -> PreTrainedModel:
    """A second model that computes with `banks` and shares every other tensor with `model`.

    Raises:
        ValueError: `banks` are not exactly the model's sparse layers, or a shape differs.
    """
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, memo=dict(shared))
    layers = sparse_layers(other)
    if [(side, index) for side, index, _ in layers] != [(bank.side, bank.layer) for bank in banks]:
        raise ValueError(f"banks for {[(b.side, b.layer) for b in banks]} do not fit {[l[:2] for l in layers]}")
    for (_, _, mlp), bank in zip(layers, banks):
        for index, expert in enumerate(mlp.experts.values()):
            for name in ("wi", "wo"):
                old, new = getattr(expert, name).weight, getattr(bank, name)[index].t()
                if old.shape != new.shape:
                    raise ValueError(
                        f"{bank.side} {bank.layer} {name}: {tuple(new.shape)} given, {tuple(old.shape)} needed"
                    )
                getattr(expert, name).weight = nn.Parameter(new.to(old).contiguous(), requires_grad=False)
    return other
