"""A drafted tree: which continuations of a request are worth a verification, and which of them the target follows.

Every node that the draft has read has candidates, the tokens that may come after it, drawn from the draft's law without
replacement (greedy: its most likely ones). Some candidates become nodes themselves:

    x_0 --- a --- c          x_0: the last committed token
         |     `- d          a, b, c, d: candidates that became nodes, inputs of one verification
         `- b     .          . : a candidate of b that did not

Which ones, is decided best first, by the chance that the target comes that far as the draft believes (`tree_beliefs`):
EAGLE-2 (arXiv 2406.16858) and OPT-Tree (arXiv 2406.17276) grow trees so, and when the draft is sure what comes out is a chain.

Expert-aware pruning, this project's: a node that adds experts to those of the round has to be worth them. The next round
would need an accepted node's experts anyway, so only a rejected node's are in vain: a node of chance c that adds n experts
per layer is kept if c >= price x (1 - c) x n.

The target follows the tree as in SpecInfer (arXiv 2305.09781) and Sequoia (arXiv 2402.12374): candidates are tried in
the order they were drawn, and each rejection leaves a residual law. All that were drawn are tried, nodes or not: the
target's law after a node decides about its candidates, so it needs to have read none of them. An accepted candidate
that is no node ends the round. So whatever decides which candidates become nodes, their own tokens and experts
included, the text follows the target's law.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch
from torch import Generator, Tensor

from specter_lab.measure.sampling import GREEDY, sample
from specter_lab.measure.tree_beliefs import Belief, as_drafted

# (candidates' tokens in order, draft's law q [V], target's law p [V], generator) -> place of the accepted one, token
TryRule = Callable[[Sequence[int], Tensor, Tensor, Generator], tuple[int | None, int]]

UNREAD_EXPERTS = 1.0  # new experts per layer that a node is taken to bring until the draft has read it


@dataclass(frozen=True)
class TreeShape:
    """How a tree may grow."""

    nodes: int  # N, drafted tokens of a round at most
    width: int = 4  # candidates of a node; 1: a chain
    belief: Belief = as_drafted
    together: float = 0.5  # share of the best unread node's chance from which others are read in the same step
    price: float = 0.0  # tokens that an expert per layer costs which a node adds to the round in vain
    blind: float | None = None  # experts per layer that every node is taken to add; None: look at the draft's routing


@dataclass(eq=False)
class Node:
    """A token in its tree. What the draft says of it is there once it has been read."""

    token: int
    parent: Node | None = None
    depth: int = 0
    chance: float = 1.0  # c, that the target accepts it and all above it, as the draft believes
    candidates: list[Node] = field(default_factory=list)  # in the order they were drawn
    law: Tensor | None = None  # [V] float64, what they were drawn from
    indices: np.ndarray | None = None  # [L, k] experts the draft used
    weights: np.ndarray | None = None  # [L, k] its routing weights
    experts: np.ndarray | None = None  # [L, E] bool, the same experts

    def path(self) -> list[Node]:
        """From the root to this node."""
        return [*([] if self.parent is None else self.parent.path()), self]


def draw(logits: Tensor, shape: TreeShape, temperature: float, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates after rows of draft logits [N, V], in order.

    Returns:
        The law they are drawn from [N, V] float64 (at temperature 0 that of temperature 1), their tokens [N, W], and the
        chance that each is the one accepted after its parent [N, W].
    """
    law = torch.softmax(logits.double() / (temperature or 1.0), dim=-1)
    width = min(shape.width, law.shape[-1])
    if temperature == GREEDY:
        tokens = law.topk(width).indices
    else:  # an exponential race: the order of arrival is that of drawing without replacement
        tokens = (law / torch.empty_like(law).exponential_(generator=generator)).topk(width).indices
    return law, tokens, shape.belief(law, tokens)


def best_nodes(root: Node, shape: TreeShape) -> list[Node]:
    """The nodes of a tree, best first: the candidates most likely to be accepted that are worth their new experts."""
    number, merged, nodes = count(), root.experts.copy(), []
    waiting: list[tuple[float, int, Node]] = []

    def consider(candidates: Sequence[Node]) -> None:
        for node in candidates:
            heapq.heappush(waiting, (-node.chance, next(number), node))

    consider(root.candidates)
    while waiting and len(nodes) < shape.nodes:
        *_, node = heapq.heappop(waiting)
        added = _new_experts(node, merged) if shape.blind is None else shape.blind
        if shape.price * (1 - node.chance) * added > node.chance:
            continue  # and so nobody below it is considered
        nodes.append(node)
        if node.experts is not None:
            merged |= node.experts
        consider(node.candidates)
    return nodes


def _new_experts(node: Node, merged: np.ndarray) -> float:
    """Experts per layer that a node adds to the merged set [L, E]."""
    return UNREAD_EXPERTS if node.experts is None else float((node.experts & ~merged).sum() / len(merged))


def to_read(nodes: Sequence[Node], shape: TreeShape) -> list[Node]:
    """Those of a tree's nodes, best first, that the draft reads next: a candidate of theirs may become a node.

    Much less likely ones wait: what comes of the others may take their places.
    """
    full = len(nodes) == shape.nodes
    unread = [node for node in nodes if node.law is None and not (full and node.chance <= nodes[-1].chance)]
    return [node for node in unread if node.chance >= shape.together * unread[0].chance]


def follow(
    root: Node, nodes: Sequence[Node], laws: Mapping[Node, Tensor], rule: TryRule, generator: Generator
) -> tuple[list[Node], int]:
    """The accepted nodes below the root, and the token after them; `laws`: the target's [V] after root and nodes."""
    members, path = set(nodes), [root]
    while True:
        node = path[-1]
        place, token = rule([c.token for c in node.candidates], node.law, laws[node], generator)
        if place is None or node.candidates[place] not in members:
            return path[1:], token
        path.append(node.candidates[place])


def try_in_turn(tokens: Sequence[int], q: Tensor | None, p: Tensor, generator: Generator) -> tuple[int | None, int]:
    """The exact rule: keep x with probability min(1, p(x) / q(x)); a rejection leaves max(p - q, 0), and q without x.

    Both laws are normalised again; when nobody is accepted the token is drawn from what is left of p. Greedy (p one-hot)
    keeps the candidate that is the target's choice.

    Args:
        tokens: candidates, drawn from `q` [V] one after the other without replacement; none: `q` is not looked at.
        p: [V] the target's law, float64.
    """
    for place, token in enumerate(tokens):
        likely = q[token] > 0  # greedily, and in a law with few tokens, candidates follow that are never drawn
        if likely and torch.rand((), generator=generator, device=p.device, dtype=p.dtype) * q[token] < p[token]:
            return place, token
        p, q = residual(p, q), without(q, token)
    return None, int(sample(p[None], generator))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What the target's law [V] leaves when a token drawn from q [V] was rejected."""
    left = (p - q).clamp_min(0)
    return left / left.sum() if left.sum() > 0 else p  # p = q up to rounding


def without(q: Tensor, token: int) -> Tensor:
    """A law [V] that does not have `token`; all zero where there was nothing else."""
    left = q.index_fill(0, torch.tensor(token, device=q.device), 0.0)
    return left / left.sum().clamp_min(torch.finfo(q.dtype).tiny)
