"""Switch models with weights quantised per output channel: the routed experts, or every linear layer but the routers."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from specter_lab.compress.per_channel import CLIPPING, dequantize, quantize
from specter_lab.models.switch import SwitchBank, read_switch_banks, with_switch_banks

EXPERTS, ALL = SCOPES = ("experts only", "all linear layers")


def rounded(weights: Tensor, bits: int, divisor: str = CLIPPING) -> Tensor:
    """Effective weights [E, M, N] after quantising."""
    return dequantize(quantize(weights, bits, divisor)).to(weights.dtype)


def quantize_bank(bank: SwitchBank, bits: int, divisor: str = CLIPPING) -> SwitchBank:
    """The experts of one layer as their codes read them back.

    Raises:
        TypeError: anything but a `SwitchBank`: routers and norms are not quantised.
    """
    if not isinstance(bank, SwitchBank):
        raise TypeError(f"a SwitchBank is needed, got {type(bank).__name__}: routers and norms are not quantised")
    return SwitchBank(bank.side, bank.layer, rounded(bank.wi, bits, divisor), rounded(bank.wo, bits, divisor))


def quantized_switch(
    model: PreTrainedModel, bits: int, divisor: str = CLIPPING, scope: str = EXPERTS
) -> PreTrainedModel:
    """A second model with quantised weights; everything else is shared with `model`.

    "All linear layers" leaves out routers, norms, position biases and the embedding, which is also the output layer.

    Raises:
        ValueError: unknown scope, bits or divisor.
    """
    if scope not in SCOPES:
        raise ValueError(f"scope '{scope}': give one of {', '.join(SCOPES)}")
    other = with_switch_banks(model, [quantize_bank(bank, bits, divisor) for bank in read_switch_banks(model)])
    if scope == ALL:
        for name, module in other.named_modules():
            if isinstance(module, nn.Linear) and not _left_alone(name):
                weight = module.weight.detach().t()[None]  # [1, M, N]
                module.weight = nn.Parameter(rounded(weight, bits, divisor)[0].t().contiguous(), requires_grad=False)
    return other


def _left_alone(name: str) -> bool:
    return name == "lm_head" or ".router." in name or ".experts." in name  # experts are done


def quantized_share(model: PreTrainedModel, other: PreTrainedModel) -> float:
    """Share of the parameters that `other` does not share with `model`."""
    mine = {id(p) for p in model.parameters()}
    unique = {id(p): p for p in other.parameters()}.values()
    return sum(p.numel() for p in unique if id(p) not in mine) / sum(p.numel() for p in unique)
