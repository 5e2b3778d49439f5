"""specter-trees: a drafted tree instead of a chain, and a tree that asks what its nodes' experts cost (ours, not the paper's).

All systems draft with the paper's INT4 draft and verify at most NODES drafted tokens per round:

    chain                        what Specter drafts
    tree, draft's probabilities  grown by them, as EAGLE-2 and OPT-Tree do
    tree                         grown by chances fitted on other requests (`measure.tree_beliefs`)
    tree, all at once            the same tree; the draft reads all new nodes in the step after they became nodes, as EAGLE-2
                                 does, and not the likely ones first
    tree, expert-aware           a node has to be worth the experts that it would add in vain
    chain, expert-aware          the same without branches
    chain, expert-blind          the same price, but every node is taken to add what nodes add on average: is it the experts, or
                                 only that a round ends when the draft is in doubt?

Rounds are run on zoo models, greedily and at temperature 1, along texts that the target has sampled, the same for all systems (small
models repeat themselves greedily, which flatters a cache): tokens per round and distinct experts are measured. Every round
is then replayed as the original's, in fast mode behind PCIe 5: times are simulated.

The price of an expert is an exchange rate: the link's time for one needed expert of every layer, over the time of a token;
both of the chain on other requests at the low budget, simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import offload, routing
from specter_lab.experiments.specter.beyond import BUDGETS, PROFILE
from specter_lab.experiments.specter.simulated import columns
from specter_lab.experiments.specter.simulation_rows import DECODE, per_request
from specter_lab.experiments.specter.trees_figure import CHAIN, RATIO, TOKENS, plot
from specter_lab.measure.bootstrap import ratio_interval
from specter_lab.measure.sampling import GREEDY
from specter_lab.measure.speculate import plain_decode
from specter_lab.measure.tree import TreeShape
from specter_lab.measure.tree_beliefs import Belief, fit_coupled, fit_sharpened
from specter_lab.measure.tree_decode import DraftStep, TreeRound, rounds_on, tree_decode
from specter_lab.models.load import shown_name
from specter_lab.plan.policies import find_policy
from specter_lab.plan.policy import Scene
from specter_lab.plan.replay import Replay
from specter_lab.plan.serve import NEEDED
from specter_lab.plan.simulate import Simulation, simulate

__all__ = ["claims", "inputs", "plot", "run"]

NODES = 8  # drafted tokens per round: near a chain's best depth at these budgets (specter-beyond, fixed depth)
WIDTH = 4  # candidates of a node
REQUESTS_PER_SET = 5
TEXT_TEMPERATURE = 1.0
FIT_PLACES = 128  # places of the other requests' texts that a belief is fitted on
POLICY = "specter-fast"
LIMITED = "low"  # the budget that sets the price
TEMPERATURES = {"greedy": GREEDY, "T = 1": 1.0}
PRICED_CHAIN, BLIND_CHAIN = "chain, expert-aware", "chain, expert-blind"
BY_DRAFT, AT_ONCE, TREE, PRICED_TREE = "tree, draft's probabilities", "tree, all at once", "tree", "tree, expert-aware"
MS, BYTES, PRICE = "simulated_ms_per_token", "simulated_h2d_mb_per_token", "simulated_tokens_per_expert"
inputs = routing.inputs_of


@dataclass(frozen=True)
class Asked:
    """One model, its draft, prompts with the target's texts after them: those to learn from, and those to decode."""

    target: PreTrainedModel
    draft: PreTrainedModel
    known: tuple[Tensor, Tensor]  # prompts [H, P], texts [H, N]
    decoded: tuple[Tensor, Tensor]  # prompts [R, P], texts [R, N]


def run(context: Context) -> pd.DataFrame:
    """Tidy rows: model, temperature, budget, system -> tokens per round, experts, simulated ms per token, over the chain's."""
    work = [
        jobs.Job(f"{model}, {name}", measure, {"model": model, "digest": routing.inputs_digest(model), "decoding": name,
                                              "seed": context.seed})
        for model in context.models for name in TEMPERATURES
    ]  # fmt: skip
    return pd.DataFrame(jobs.run(context, work))


def measure(model: str, digest: str, decoding: str, seed: int) -> jobs.Rows:
    """All rows of one model and temperature. `digest` is here to name what it reads in the cache key."""
    asked, temperature = ask(model, seed), TEMPERATURES[decoding]
    rounds_of = partial(rounds_on, asked.target, asked.draft, temperature=temperature, seed=seed)
    chain = TreeShape(NODES, width=1)
    belief = fitted(asked, temperature)
    tree = TreeShape(NODES, WIDTH, belief)
    scenes = {budget: offload.empty_scene(model, budget, profile=PROFILE) for budget in BUDGETS}
    known = rounds_of(*asked.known, shape=chain)
    price = price_of_experts(replayed(known, scenes[LIMITED]), scenes[LIMITED].layers)
    priced_chain = replace(chain, belief=belief, price=price)
    shapes = {
        CHAIN: chain, BY_DRAFT: TreeShape(NODES, WIDTH), AT_ONCE: replace(tree, together=0.0), TREE: tree,
        PRICED_TREE: replace(tree, price=price), PRICED_CHAIN: priced_chain,
        BLIND_CHAIN: replace(priced_chain, blind=added_experts(known)),
    }  # fmt: skip
    rounds = {item: rounds_of(*asked.decoded, shape=shape) for item, shape in shapes.items()}
    equal = {PRICED_TREE: equal_tokens(asked, shapes[PRICED_TREE])} if temperature == GREEDY else {}
    rows = []
    for budget, scene in scenes.items():
        found = {item: replayed(each, scene) for item, each in rounds.items()}
        base = {"model": shown_name(model), "family": routing.family(model), "decoding": decoding, "budget": budget,
                "n_requests": len(asked.decoded[0])}  # fmt: skip
        rows += [
            base | {"item": item, PRICE: round(shapes[item].price, 4), "equal_tokens": equal.get(item)}
            | _measured(each, seed) | _simulated(found[item], found[CHAIN], seed)
            for item, each in rounds.items()
        ]  # fmt: skip
    return rows


def ask(model: str, seed: int) -> Asked:
    """A zoo model with its INT4 draft, and the prompts of the simulated experiments, fewer of each set."""
    question = routing.ask(model, offload.POOL_PER_SET, seed)
    target, (prompts, sets) = question.source.model, offload.long_prompts(question)
    known = offload.first_of_each(sets, offload.HISTORY_PER_SET)
    chosen = np.setdiff1d(offload.first_of_each(sets, offload.HISTORY_PER_SET + REQUESTS_PER_SET), known)
    how = {"new_tokens": offload.NEW_TOKENS, "temperature": TEXT_TEMPERATURE, "seed": seed}
    texts = (plain_decode(target, prompts[rows], **how).tokens for rows in (known, chosen))
    return Asked(target, offload.drafter(question), *zip((prompts[known], prompts[chosen]), texts))


def fitted(asked: Asked, temperature: float) -> Belief:
    """What the draft should believe of its candidates, from the known requests."""
    prompts, tokens = asked.known
    with torch.inference_mode():
        inputs, first = torch.cat([prompts, tokens[:, :-1]], dim=1).to(asked.target.device), prompts.shape[1] - 1
        places = torch.linspace(0, tokens.numel() - 1, FIT_PLACES).long()
        draft, target = (
            m(input_ids=inputs).logits[:, first:].flatten(0, 1)[places] for m in (asked.draft, asked.target)
        )
        return fit_sharpened(draft, target) if temperature == GREEDY else fit_coupled(draft, target)


def equal_tokens(asked: Asked, shape: TreeShape) -> float:
    """Share of greedily decoded tokens that are plain decoding's, with trees."""
    prompts, text = asked.decoded
    trees = tree_decode(asked.target, asked.draft, prompts, new_tokens=text.shape[1], shape=shape).tokens
    return float((trees == plain_decode(asked.target, prompts, new_tokens=text.shape[1]).tokens).double().mean())


def price_of_experts(chain: Simulation, layers: int) -> float:
    """Tokens that the link's time for one needed expert of every layer would give."""
    rounds = chain.rounds
    expert_ms = rounds.h2d_ms.sum() / chain.hits.counts[NEEDED] * layers
    return float(expert_ms * chain.tokens_per_s * 1e-3)


def added_experts(chains: Sequence[Sequence[TreeRound]]) -> float:
    """Experts per layer that a drafted token of a chain adds to those before it, as the draft routes, on average."""
    drafted = [np.concatenate([step.indices for step in one.steps]) for of_request in chains for one in of_request]
    return float(np.mean([(distinct(tokens) - distinct(tokens[:1])) / (len(tokens) - 1) for tokens in drafted]))


def replayed(rounds_of: Sequence[Sequence[TreeRound]], scene: Scene, new_tokens: int | None = None) -> Simulation:
    """The rounds of all requests, one after the other, in fast mode; `new_tokens` of each, default: the setting's."""
    replay = Replay(scene.num_experts, scene.layers)
    for rounds in rounds_of:
        replay.begin_request()
        for one in rounds:
            kept = [(step.indices[step.kept], step.weights[step.kept]) for step in one.steps]
            drafted, weights = zip(*kept)
            replay.add_tree(one.accepted, drafted, weights, list(map(_read, one.steps)), one.target.swapaxes(0, 1))
    return simulate(replay, find_policy(POLICY), scene, new_tokens=new_tokens or offload.NEW_TOKENS)


def _read(step: DraftStep) -> tuple[int, float]:
    """Nodes of a step, and distinct experts per layer that the draft used for them."""
    return len(step.kept), distinct(step.indices)


def distinct(experts: np.ndarray) -> float:
    """Distinct experts per layer of tokens [T, L, k]."""
    return float(np.mean([len(np.unique(of_layer)) for of_layer in experts.swapaxes(0, 1)]))


def _measured(rounds_of: Sequence[Sequence[TreeRound]], seed: int) -> dict:
    """What the zoo model did."""
    rounds = [one for of_request in rounds_of for one in of_request]
    means = {
        "nodes_per_round": [one.nodes for one in rounds],
        "draft_steps_per_round": [len(one.steps) for one in rounds],
        "draft_reads_per_round": [sum(len(step.kept) for step in one.steps) for one in rounds],
        "distinct_experts_per_layer": [distinct(one.target) for one in rounds],
    }
    committed = np.array([sum(one.accepted + 1 for one in of_request) for of_request in rounds_of], float)
    count = np.array([len(of_request) for of_request in rounds_of], float)
    numbers = {"n_rounds": len(rounds)}
    numbers |= {name: round(float(np.mean(values)), 3) for name, values in means.items()}
    return numbers | columns(TOKENS, ratio_interval(committed, count, seed=seed))


def _simulated(found: Simulation, chain: Simulation, seed: int) -> dict:
    mine, its = (per_request(each, offload.NEW_TOKENS)[DECODE] for each in (found, chain))
    mb = found.rounds.h2d_bytes.sum() / (len(mine.ms) * offload.NEW_TOKENS) / 1e6
    numbers = {BYTES: round(float(mb), 2)} | columns(MS, ratio_interval(mine.ms, mine.tokens, seed=seed), 4)
    return numbers | columns(RATIO, ratio_interval(mine.ms, its.ms, seed=seed), 4)


def table(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """One number of every system (rows) by model, decoding and budget (columns)."""
    return rows.pivot_table(index="item", columns=["model", "decoding", "budget"], values=value, sort=False)


def claims(rows: pd.DataFrame) -> list[Measured]:
    """What we expected, and our aims; every one is judged by its worst model, decoding and budget."""
    cells = rows.set_index(["model", "decoding", "budget", "item"])
    tokens, ms, moved = (cells[name].unstack("item") for name in (TOKENS, MS, BYTES))
    equal = rows.drop_duplicates(["model", "decoding", "item"])["equal_tokens"].dropna()

    def worst(name: str, ratio: pd.Series, largest: bool = True, simulated: bool = True) -> Measured:
        at = ratio.idxmax() if largest else ratio.idxmin()
        return Measured(f"specter-trees/{name}", float(ratio[at]), n=len(ratio), simulated=simulated,
                        note=", ".join(at) + " budget")  # fmt: skip

    return [
        Measured(
            "specter-trees/greedy-exact",
            float(equal.min()),
            n=len(equal) * int(rows["n_requests"].iloc[0]) * offload.NEW_TOKENS,
        ),
        worst("draft-probabilities-lose", tokens[BY_DRAFT] / tokens[CHAIN], simulated=False),
        worst("tree-gains-little", ms[TREE] / ms[CHAIN], largest=False),
        worst("expert-aware-not-slower", ms[PRICED_TREE] / ms[CHAIN]),
        worst("expert-aware-bytes", moved[PRICED_TREE] / moved[TREE]),
        worst("branches-beside-the-price", ms[PRICED_TREE] / ms[PRICED_CHAIN]),
    ]
