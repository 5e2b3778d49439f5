"""The paper's setting (Specter, section Setting and artifact), and which of its models a zoo model stands for."""

from __future__ import annotations

from dataclasses import dataclass

from specter_lab.models.anatomy import Anatomy, anatomy_of
from specter_lab.models.zoo.shapes import SHAPES


@dataclass(frozen=True)
class Budget:
    """GPU memory budgets of one model and what the paper's system makes of them."""

    high_gb: float
    low_gb: float
    high_slots: int  # expert slots per MoE layer at the high budget
    low_slots: int
    depth: int  # the paper's K*


# by family, as in claims.toml
BUDGETS = {"qwen": Budget(20, 16, 15, 8, 8), "phi": Budget(40, 32, 2, 1, 16), "deepseek": Budget(24, 18, 16, 4, 16)}


def priced_as(model: str) -> Anatomy:
    """The model whose bytes and FLOPs the cost model counts: the original a zoo model stands for, else the model itself.

    Raises:
        UserError: nothing by that name, or an architecture without adapter.
    """
    return anatomy_of(SHAPES[model].original if model in SHAPES else model)
