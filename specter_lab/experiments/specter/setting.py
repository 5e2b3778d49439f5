"""The paper's setting (Specter, section Setting and artifact), and which of its models a zoo model stands for."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import Qwen2MoeConfig

from specter_lab.models.anatomy import Anatomy, anatomy, anatomy_of
from specter_lab.models.geometry import GEOMETRY
from specter_lab.models.originals import config_for
from specter_lab.models.zoo.shapes import SHAPES

DENSE = "dense-nano"


@dataclass(frozen=True)
class Budget:
    """GPU memory budgets of one model and what the paper's system makes of them."""

    high_gb: float
    low_gb: float
    high_slots: int  # expert slots per MoE layer at the high budget
    low_slots: int
    depth: int  # the paper's K*


# by family, as claims.toml names it
BUDGETS = {"qwen": Budget(20, 16, 15, 8, 8), "phi": Budget(40, 32, 2, 1, 16), "deepseek": Budget(24, 18, 16, 4, 16)}


def priced_as(model: str) -> Anatomy:
    """The model whose bytes and FLOPs the cost model counts: the original that a zoo model stands for, or itself.

    The dense zoo model stands for its original with one expert, as wide as the top-k that a token uses there.

    Raises:
        UserError: nothing by that name, or an architecture without adapter.
    """
    if model not in SHAPES:
        return anatomy_of(model)
    original = SHAPES[model].original
    if model != DENSE:
        return anatomy_of(original)
    config = config_for(original)
    width = config.num_experts_per_tok * config.moe_intermediate_size
    dense = {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": width}
    return anatomy(Qwen2MoeConfig(**{**config.to_dict(), **dense}), f"{original}, dense")


def slots_of(model: str, family: str) -> dict[str, float]:
    """Expert slots per MoE layer at the "high" and the "low" budget.

    The paper's for its models and those that stand for them; a quarter and an eighth of the experts for others. The
    dense model keeps the same share of its one expert as its original does of many.

    Raises:
        UserError: nothing by that name, or an architecture without adapter.
    """
    priced = priced_as(model)
    originals = {name for row in GEOMETRY.values() for name in (row.name, row.hub_id)}
    if family not in BUDGETS or model not in SHAPES.keys() | originals:
        return {"high": max(1, priced.num_experts // 4), "low": max(1, priced.num_experts // 8)}
    slots = {"high": BUDGETS[family].high_slots, "low": BUDGETS[family].low_slots}
    if model == DENSE:
        experts = anatomy_of(SHAPES[DENSE].original).num_experts
        return {limit: count / experts for limit, count in slots.items()}
    return slots
