"""One grouped matrix product instead of a loop over experts, for training Switch models.

Transformers' Switch class computes its experts one after another and synchronises with the host to skip those without
tokens. `group_experts` puts a module in its place that computes the same function (no capacity limit, no dropped
token) with the experts' weights stacked; `ungroup_experts` puts the class's own module back, with the trained weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel


class GroupedSwitchMLP(nn.Module):
    """A sparse feed-forward layer of a Switch model: router (float32), top-1, experts of two matrices and ReLU.

    `real` (set by the caller, [B, T] bool) names the tokens that are no padding; `balance` and `load` of the last
    forward pass count those only.
    """

    def __init__(self, sparse: nn.Module, dropout: float) -> None:
        super().__init__()
        self.sparse = (sparse,)  # the class's own module, hidden from the list of parameters
        experts = list(sparse.experts.values())
        self.router = nn.Parameter(sparse.router.classifier.weight.detach().clone())  # [E, d]
        self.wi = nn.Parameter(torch.stack([expert.wi.weight.detach() for expert in experts]))  # [E, f, d]
        self.wo = nn.Parameter(torch.stack([expert.wo.weight.detach() for expert in experts]))  # [E, d, f]
        self.dropout = nn.Dropout(dropout)
        self.real: Tensor | None = None
        self.balance: Tensor | None = None  # scalar; 1.0 = even
        self.load: Tensor | None = None  # [E] share of tokens, sums to one

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)  # [N, d]
        with torch.autocast(hidden.device.type, enabled=False):
            probability = F.linear(tokens.float(), self.router.float()).softmax(-1)  # [N, E]
        scale, expert = probability.max(-1)  # [N]
        self._observe(probability, expert)
        order = expert.argsort(stable=True)
        ends = torch.zeros(len(self.router), dtype=torch.int64, device=hidden.device).scatter_add_(
            0, expert, torch.ones_like(expert)
        ).cumsum(0).to(torch.int32)  # [E] end of each expert's rows; bincount would synchronise  # fmt: skip
        dtype = torch.bfloat16 if hidden.is_cuda else torch.float32  # the grouped product on a GPU knows BF16 only
        rows = tokens[order].to(dtype)  # [N, d], expert after expert
        inner = F.grouped_mm(rows, self.wi.to(dtype).transpose(1, 2), offs=ends).relu()  # [N, f]
        outer = F.grouped_mm(self.dropout(inner), self.wo.to(dtype).transpose(1, 2), offs=ends)  # [N, d]
        scaled = outer * scale[order, None].to(outer.dtype)
        return torch.zeros_like(tokens).index_copy(0, order, scaled.to(tokens.dtype)).view_as(hidden)

    def _observe(self, probability: Tensor, expert: Tensor) -> None:
        """Load-balancing loss E * sum_e f_e P_e (Fedus et al. 2021, eq. 4) over real tokens."""
        real = torch.ones_like(expert, dtype=torch.float32) if self.real is None else self.real.flatten().float()
        load = torch.zeros_like(probability[0]).scatter_add_(0, expert, real) / real.sum()  # [E]
        self.load = load.detach()
        self.balance = len(self.router) * (load * (probability * real[:, None]).sum(0) / real.sum()).sum()

    @torch.no_grad()
    def ungrouped(self) -> nn.Module:
        """The class's own module with these weights."""
        (sparse,) = self.sparse
        sparse.router.classifier.weight.copy_(self.router)
        for index, expert in enumerate(sparse.experts.values()):
            expert.wi.weight.copy_(self.wi[index])
            expert.wo.weight.copy_(self.wo[index])
        return sparse


def group_experts(model: PreTrainedModel) -> dict[str, list[GroupedSwitchMLP]]:
    """Replace every sparse layer of a Switch model, in place.

    Returns:
        The new modules of "encoder" and "decoder", in layer order.
    """
    grouped: dict[str, list[GroupedSwitchMLP]] = {}
    for side in ("encoder", "decoder"):
        for block in getattr(model, side).block:
            feed_forward = block.layer[-1]
            if block.is_sparse:
                feed_forward.mlp = GroupedSwitchMLP(feed_forward.mlp, model.config.dropout_rate)
                grouped.setdefault(side, []).append(feed_forward.mlp)
    return grouped


def ungroup_experts(model: PreTrainedModel) -> None:
    """Undo `group_experts`, keeping the weights."""
    for side in ("encoder", "decoder"):
        for block in getattr(model, side).block:
            feed_forward = block.layer[-1]
            if isinstance(feed_forward.mlp, GroupedSwitchMLP):
                feed_forward.mlp = feed_forward.mlp.ungrouped()
