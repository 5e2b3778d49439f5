"""Self-speculative decoding with a drafted tree instead of a chain, the reference: `measure.speculate` with branches.

One round, for a request whose last committed token is x_0 (its KV is not in the shared prefix yet):

    draft    reads nodes, all that are new at once: first x_0, then those of its candidates that became nodes, ...
    target   reads x_0 and the N nodes in one pass; every node sees the prefix, its ancestors and itself
    commit   the accepted path and one token of the target's; the prefix keeps the path, whose nodes lie anywhere in the pass

A tree of width 1 is the chain. How trees grow and why the text is exact: `measure.tree`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel

from specter_lab.measure.capture import ForwardRouting
from specter_lab.measure.prefix import Prefix, prefill, read_seeing
from specter_lab.measure.sampling import GREEDY, distribution
from specter_lab.measure.speculate import check_start
from specter_lab.measure.tree import Node, TreeShape, TryRule, best_nodes, draw, follow, to_read, try_in_turn
from specter_lab.models.adapters import adapter_for


@dataclass(frozen=True)
class DraftStep:
    """One pass of the draft over W nodes of a tree."""

    indices: np.ndarray  # [W, L, k] experts it used
    weights: np.ndarray  # [W, L, k] its routing weights
    kept: np.ndarray  # [W] bool: still a node when the step has ended


@dataclass(frozen=True)
class TreeRound:
    """One round of one request, with a tree of N nodes."""

    steps: tuple[DraftStep, ...]
    target: np.ndarray  # [N + 1, L, k] experts the target used
    accepted: int  # 0..N

    @property
    def nodes(self) -> int:
        return len(self.target) - 1


@dataclass(frozen=True)
class TreeDecoded:
    """New tokens of B requests, and the rounds they took; the last round of a request may have committed more."""

    tokens: Tensor  # [B, N] int64
    rounds: tuple[tuple[TreeRound, ...], ...]  # per request


def tree_decode(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Tensor,
    *,
    new_tokens: int,
    shape: TreeShape,
    temperature: float = GREEDY,
    seed: int = 0,
    rule: TryRule = try_in_turn,
) -> TreeDecoded:
    """Decode B requests side by side; each one's tokens follow the target's distribution (greedy: equal its choices).

    Args:
        target, draft, prompts, new_tokens, temperature, seed: as in `speculative_decode`.
        shape: how trees may grow.
        rule: decides which candidate is accepted; anything but the default gives up exactness.

    Raises:
        UserError: as `speculative_decode`.
    """
    check_start(target, draft, prompts, new_tokens=new_tokens, depth=shape.nodes)
    prompts = prompts.to(target.device)
    generator = Generator(target.device).manual_seed(seed)
    texts: list[list[int]] = [[] for _ in prompts]
    rounds: list[list[TreeRound]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    with torch.inference_mode():
        prefix, last = prefill(target, prompts[:, :-1]), prompts[:, -1].tolist()
        while active:
            done, columns = _rounds(target, draft, prefix, last, shape, temperature, rule, generator)
            _keep_paths(prefix, [path for path, *_ in done], columns)
            for request, (path, token, one) in zip(active, done):
                texts[request] += [*(node.token for node in path[1:]), token]
                rounds[request].append(one)
            unfinished = torch.tensor([len(texts[request]) < new_tokens for request in active])
            last = [texts[request][-1] for request, goes_on in zip(active, unfinished) if goes_on]
            active = [request for request, goes_on in zip(active, unfinished) if goes_on]
            prefix.keep_rows(unfinished)
    return TreeDecoded(torch.tensor([text[:new_tokens] for text in texts]), tuple(map(tuple, rounds)))


def rounds_on(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Tensor,
    text: Tensor,
    *,
    shape: TreeShape,
    temperature: float = GREEDY,
    seed: int = 0,
) -> tuple[tuple[TreeRound, ...], ...]:
    """Rounds of B requests on given texts [B, N] that continue their prompts [B, P], per request.

    Trees are grown and judged as ever, and the next round begins as many tokens later as this one would have committed; but the
    text stays, so that different trees can be compared on the same one (as `measure.windows` does with chains). On the
    greedy text of `target`, greedily, these are the rounds of `tree_decode`.

    Raises:
        UserError: as `tree_decode`.
    """
    check_start(target, draft, prompts, new_tokens=text.shape[1], depth=shape.nodes)
    inputs = torch.cat([prompts, text], dim=1).to(target.device)
    generator = Generator(target.device).manual_seed(seed)
    rounds: list[list[TreeRound]] = [[] for _ in prompts]
    at = torch.zeros(len(prompts), dtype=torch.long)  # [B] tokens of the text that are committed
    with torch.inference_mode():
        whole = prefill(target, inputs[:, :-1])
        while len(active := (at < text.shape[1]).nonzero().flatten()):
            prefix = whole.rows(active.to(target.device))
            prefix.forget((text.shape[1] - at[active]).to(target.device))
            last = inputs[active, prompts.shape[1] - 1 + at[active]].tolist()
            done, _ = _rounds(target, draft, prefix, last, shape, temperature, try_in_turn, generator)
            for request, (path, _, one) in zip(active.tolist(), done):
                rounds[request].append(one)
                at[request] += len(path)  # accepted nodes, and one for the target's own token
    return tuple(map(tuple, rounds))


def _rounds(
    target: PreTrainedModel, draft: PreTrainedModel, prefix: Prefix, last: Sequence[int], shape: TreeShape,
    temperature: float, rule: TryRule, generator: Generator,
) -> tuple[list[tuple[list[Node], int, TreeRound]], dict[Node, int]]:  # fmt: skip
    """Draft and verify one round of every row of `prefix`, which then holds root and nodes of its tree as well.

    Returns:
        Per row root and accepted nodes, the token after them, and what is kept of the round; the nodes' columns.
    """
    trees = [Grown(Node(token)) for token in last]
    grow(draft, copy.deepcopy(prefix), trees, shape, temperature, generator)
    laws, columns, used = verify(target, prefix, trees, temperature)
    done = []
    for tree, experts in zip(trees, used):
        path, token = follow(tree.root, tree.nodes, laws, rule, generator)
        done.append(([tree.root, *path], token, TreeRound(tuple(tree.steps), experts, len(path))))
    return done, columns


class Grown:
    """A request's tree while it grows."""

    def __init__(self, root: Node) -> None:
        self.root = root
        self.nodes: list[Node] = []  # best first, so parents before their children; the root is none of them
        self.steps: list[DraftStep] = []


def grow(
    draft: PreTrainedModel, prefix: Prefix, trees: Sequence[Grown], shape: TreeShape, temperature: float,
    generator: Generator,
) -> None:  # fmt: skip
    """Grow every tree until no candidate can become a node; `prefix` is the draft's own to spoil."""
    num_experts = adapter_for(draft.config).num_experts(draft.config)
    columns: dict[Node, int] = {}
    shared, reading = prefix.cache.get_seq_length(), [[tree.root] for tree in trees]
    while any(reading):
        logits, routing = read_nodes(draft, prefix, shared, reading, columns)
        laws, *drawn = draw(logits, shape, temperature, generator)
        said = (part.cpu() for part in (*drawn, routing.indices, routing.weights))
        for node, law, tokens, chances, indices, weights in zip(chain(*reading), laws, *said):
            node.law, node.indices, node.weights = law, indices.numpy(), weights.numpy()
            node.experts = (node.indices[..., None] == np.arange(num_experts)).any(axis=1)
            pairs = zip(tokens.tolist(), (node.chance * chances).tolist())
            node.candidates = [Node(token, node, node.depth + 1, chance) for token, chance in pairs]
        for tree, read in zip(trees, reading):
            if read:
                tree.nodes = best_nodes(tree.root, shape)
                tree.steps.append(_step(read, {tree.root, *tree.nodes}))
        reading = [to_read(tree.nodes, shape) if read else [] for tree, read in zip(trees, reading)]


def _step(read: Sequence[Node], members: set[Node]) -> DraftStep:
    experts = (np.stack([getattr(node, name) for node in read]) for name in ("indices", "weights"))
    return DraftStep(*experts, np.array([node in members for node in read]))


def verify(
    target: PreTrainedModel, prefix: Prefix, trees: Sequence[Grown], temperature: float
) -> tuple[dict[Node, Tensor], dict[Node, int], list[np.ndarray]]:
    """One pass of the target over roots and nodes, whose KV comes behind the prefix.

    Returns:
        Its law [V] float64 after each, their columns, and the experts it used, [N + 1, L, k] per tree.
    """
    inputs, columns = [[tree.root, *tree.nodes] for tree in trees], {}
    logits, routing = read_nodes(target, prefix, prefix.cache.get_seq_length(), inputs, columns)
    laws = dict(zip(chain(*inputs), distribution(logits, temperature).double()))
    used = routing.indices.cpu().split([len(nodes) for nodes in inputs])
    return laws, columns, [experts.numpy() for experts in used]


def read_nodes(
    model: PreTrainedModel, prefix: Prefix, shared: int, reading: Sequence[Sequence[Node]], columns: dict[Node, int]
) -> tuple[Tensor, ForwardRouting]:
    """One pass over nodes of B trees, each of which sees its row's prefix, its ancestors and itself.

    Args:
        shared: S, columns of the cache before those of the trees.
        columns: of the cache, for every node that has been read; the new ones are added.

    Returns:
        Logits [N, V] and routing of the nodes, tree by tree.
    """
    batch, width, held = len(reading), max(map(len, reading)), prefix.cache.get_seq_length()
    inputs, depths = torch.zeros(2, batch, width, dtype=torch.long)
    places, pairs = [], []  # of the nodes among B * T inputs; (row, input, column that it sees)
    for row, nodes in enumerate(reading):
        for place, node in enumerate(nodes):
            columns[node] = held + place
            inputs[row, place], depths[row, place] = node.token, node.depth
            places.append(row * width + place)
            pairs += [(row, place, columns[seen]) for seen in node.path()]
    seen = torch.zeros(batch, width, held + width, dtype=torch.bool)
    seen[:, :, :shared] = (torch.arange(shared) >= shared - prefix.lengths.cpu()[:, None])[:, None]
    seen[tuple(torch.tensor(pairs).T)] = True
    scores = torch.zeros(seen.shape, dtype=model.dtype).masked_fill(~seen, torch.finfo(model.dtype).min)
    positions = prefix.lengths[:, None] + depths.to(model.device)
    of_inputs = (part.to(model.device) for part in (inputs, scores[:, None], positions))
    return read_seeing(model, prefix, *of_inputs, torch.tensor(places))


def _keep_paths(prefix: Prefix, paths: Sequence[Sequence[Node]], columns: dict[Node, int]) -> None:
    """Behind every row's prefix hold only the nodes of its path."""
    device = prefix.lengths.device
    lengths = prefix.lengths + torch.tensor([len(path) for path in paths], device=device)
    width = int(lengths.max())
    kept = torch.zeros(len(paths), width, dtype=torch.long)
    for row, (path, before) in enumerate(zip(paths, prefix.lengths.tolist())):
        shared = columns[path[0]]  # the root stands right behind the prefix
        own = [*range(shared - before, shared), *(columns[node] for node in path)]
        kept[row, width - len(own) :] = torch.tensor(own)
    prefix.take(kept.to(device), lengths)
