"""specter-trees: a drafted tree instead of a chain, and a tree that asks what its nodes' experts cost (ours, not the paper's).

All systems draft with the paper's INT4 draft and verify at most NODES drafted tokens per round:

    chain                        what Specter drafts
    tree, draft's probabilities  grown by them, as EAGLE-2 and OPT-Tree do
    tree                         grown by chances fitted on other requests (`measure.tree_beliefs`)
    tree, all at once            the same tree; the draft reads all new nodes in the step after they became nodes, as EAGLE-2
                                 does, and not the likely ones first
    tree, expert-aware           a node has to be worth the experts that it would add in vain
    chain, expert-aware          the same without branches

Texts are really decoded, greedily and at temperature 1, on zoo models: tokens per round and distinct experts are measured.
Every round is then replayed as the original's, in fast mode behind PCIe 5: times are simulated.

The price of an expert is an exchange rate: the link's time for one needed expert of every layer, over the time of a token;
both of the chain on other requests at the low budget, simulated.
"""

from __future__ import annotations

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
from specter_lab.experiments.specter.trees_figure import plot as plot
from specter_lab.measure.bootstrap import ratio_interval
from specter_lab.measure.sampling import GREEDY
from specter_lab.measure.speculate import plain_decode
from specter_lab.measure.tree import TreeShape
from specter_lab.measure.tree_beliefs import Belief, fit_coupled, fit_sharpened
from specter_lab.measure.tree_decode import DraftStep, TreeDecoded, tree_decode
from specter_lab.models.load import shown_name
from specter_lab.plan.policies import find_policy
from specter_lab.plan.policy import Scene
from specter_lab.plan.replay import Replay
from specter_lab.plan.serve import NEEDED
from specter_lab.plan.simulate import Simulation, simulate

NODES = 8  # drafted tokens per round: near a chain's best depth at these budgets (specter-beyond, fixed depth)
WIDTH = 4  # candidates of a node
REQUESTS_PER_SET = 5
FIT_PLACES = 128  # places of the other requests' texts that a belief is fitted on
POLICY = "specter-fast"
LIMITED = "low"  # the budget that sets the price
TEMPERATURES = {"greedy": GREEDY, "T = 1": 1.0}
CHAIN, PRICED_CHAIN = "chain", "chain, expert-aware"
BY_DRAFT, AT_ONCE, TREE, PRICED_TREE = "tree, draft's probabilities", "tree, all at once", "tree", "tree, expert-aware"
TOKENS, MS, RATIO, BYTES = (
    "tokens_per_round",
    "simulated_ms_per_token",
    "simulated_over_chain",
    "simulated_h2d_mb_per_token",
)
inputs = routing.inputs_of


@dataclass(frozen=True)
class Asked:
    """One model, its draft, and the prompts: those to learn from, and those to decode."""

    target: PreTrainedModel
    draft: PreTrainedModel
    known: Tensor  # [H, P]
    prompts: Tensor  # [R, P]


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
    how = {"new_tokens": offload.NEW_TOKENS, "temperature": temperature, "seed": seed}
    decode = partial(tree_decode, asked.target, asked.draft, **how)
    chain = TreeShape(NODES, width=1)
    known = decode(asked.known, shape=chain)
    belief = fitted(asked, known.tokens, temperature)
    tree = TreeShape(NODES, WIDTH, belief)
    scenes = {budget: offload.empty_scene(model, budget, profile=PROFILE) for budget in BUDGETS}
    price = price_of_experts(replayed(known, scenes[LIMITED]), scenes[LIMITED].layers)
    shapes = {
        CHAIN: chain, BY_DRAFT: TreeShape(NODES, WIDTH), AT_ONCE: replace(tree, together=0.0), TREE: tree,
        PRICED_TREE: replace(tree, price=price), PRICED_CHAIN: replace(chain, belief=belief, price=price),
    }  # fmt: skip
    decoded = {item: decode(asked.prompts, shape=shape) for item, shape in shapes.items()}
    text = plain_decode(asked.target, asked.prompts, **how).tokens if temperature == GREEDY else None
    rows = []
    for budget, scene in scenes.items():
        found = {item: replayed(each, scene) for item, each in decoded.items()}
        base = {"model": shown_name(model), "family": routing.family(model), "decoding": decoding, "budget": budget,
                "n_requests": len(asked.prompts)}  # fmt: skip
        rows += [
            base | {"item": item, "price": round(shapes[item].price, 4)} | _measured(each, text, seed)
            | _simulated(found[item], found[CHAIN], seed)
            for item, each in decoded.items()
        ]  # fmt: skip
    return rows


def ask(model: str, seed: int) -> Asked:
    """A zoo model with its INT4 draft, and the prompts of the simulated experiments, fewer of each set."""
    question = routing.ask(model, offload.POOL_PER_SET, seed)
    prompts, sets = offload.long_prompts(question)
    known = offload.first_of_each(sets, offload.HISTORY_PER_SET)
    chosen = np.setdiff1d(offload.first_of_each(sets, offload.HISTORY_PER_SET + REQUESTS_PER_SET), known)
    return Asked(question.source.model, offload.drafter(question), prompts[known], prompts[chosen])


def fitted(asked: Asked, tokens: Tensor, temperature: float) -> Belief:
    """What the draft should believe of its candidates, from the texts [H, N] of the known requests."""
    text = torch.cat([asked.known, tokens], dim=1)
    with torch.inference_mode():
        logits = (
            m(input_ids=text).logits[:, asked.known.shape[1] : -1].flatten(0, 1) for m in (asked.draft, asked.target)
        )
        places = torch.linspace(0, tokens[:, 1:].numel() - 1, FIT_PLACES).long()
        draft, target = (of_model[places] for of_model in logits)
        return fit_sharpened(draft, target) if temperature == GREEDY else fit_coupled(draft, target)


def price_of_experts(chain: Simulation, layers: int) -> float:
    """Tokens that the link's time for one needed expert of every layer would give."""
    rounds = chain.rounds
    expert_ms = rounds.h2d_ms.sum() / chain.hits.counts[NEEDED] * layers
    return float(expert_ms * chain.tokens_per_s * 1e-3)


def replayed(decoded: TreeDecoded, scene: Scene) -> Simulation:
    """The rounds of all requests, one after the other, in fast mode."""
    replay = Replay(scene.num_experts, scene.layers)
    for rounds in decoded.rounds:
        replay.begin_request()
        for one in rounds:
            kept = [(step.indices[step.kept], step.weights[step.kept]) for step in one.steps]
            drafted, weights = zip(*kept)
            replay.add_tree(one.accepted, drafted, weights, list(map(_read, one.steps)), one.target.swapaxes(0, 1))
    return simulate(replay, find_policy(POLICY), scene, new_tokens=offload.NEW_TOKENS)


def _read(step: DraftStep) -> tuple[int, float]:
    """Nodes of a step, and distinct experts per layer that the draft used for them."""
    return len(step.kept), distinct(step.indices)


def distinct(experts: np.ndarray) -> float:
    """Distinct experts per layer of tokens [T, L, k]."""
    return float(np.mean([len(np.unique(of_layer)) for of_layer in experts.swapaxes(0, 1)]))


def _measured(decoded: TreeDecoded, text: Tensor | None, seed: int) -> dict:
    """What the zoo model did; `text` is that of plain decoding."""
    rounds = [one for of_request in decoded.rounds for one in of_request]
    means = {
        "nodes_per_round": [one.nodes for one in rounds],
        "draft_steps_per_round": [len(one.steps) for one in rounds],
        "draft_reads_per_round": [sum(len(step.kept) for step in one.steps) for one in rounds],
        "distinct_experts_per_layer": [distinct(one.target) for one in rounds],
    }
    committed = np.array([sum(one.accepted + 1 for one in of_request) for of_request in decoded.rounds], float)
    count = np.array([len(of_request) for of_request in decoded.rounds], float)
    numbers = {"n_rounds": len(rounds), "n_tokens": decoded.tokens.numel(),
               "equal_tokens": None if text is None else int((decoded.tokens == text).sum())}  # fmt: skip
    numbers |= {name: round(float(np.mean(values)), 3) for name, values in means.items()}
    return numbers | columns(TOKENS, ratio_interval(committed, count, seed=seed))


def _simulated(found: Simulation, chain: Simulation, seed: int) -> dict:
    mine, its = (per_request(each, offload.NEW_TOKENS)[DECODE] for each in (found, chain))
    mb = found.rounds.h2d_bytes.sum() / found.rounds.tokens.sum() / 1e6
    numbers = {BYTES: round(float(mb), 2)} | columns(MS, ratio_interval(mine.ms, mine.tokens, seed=seed), 4)
    return numbers | columns(RATIO, ratio_interval(mine.ms, its.ms, seed=seed), 4)


def table(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """One number of every system (rows) by model, decoding and budget (columns)."""
    return rows.pivot_table(index="item", columns=["model", "decoding", "budget"], values=value, sort=False)


def claims(rows: pd.DataFrame) -> list[Measured]:
    """What we expected, and our aims; every one is judged by its worst model, decoding and budget."""
    cells = rows.set_index(["model", "decoding", "budget", "item"])
    tokens, ms, moved = (cells[name].unstack("item") for name in (TOKENS, MS, BYTES))
    greedy = rows[rows["equal_tokens"].notna()]

    def worst(name: str, ratio: pd.Series, largest: bool = True, simulated: bool = True) -> Measured:
        at = ratio.idxmax() if largest else ratio.idxmin()
        return Measured(f"specter-trees/{name}", float(ratio[at]), n=len(ratio), simulated=simulated,
                        note=", ".join(at) + " budget")  # fmt: skip

    return [
        Measured(
            "specter-trees/greedy-exact",
            float((greedy["equal_tokens"] / greedy["n_tokens"]).min()) if len(greedy) else None,
            n=int(greedy["n_tokens"].sum()),
            note="" if len(greedy) else "nothing was decoded greedily",
        ),
        worst("draft-probabilities-lose", tokens[BY_DRAFT] / tokens[CHAIN], simulated=False),
        worst("tree-gains-little", ms[TREE] / ms[CHAIN], largest=False),
        worst("expert-aware-not-slower", ms[PRICED_TREE] / ms[CHAIN]),
        worst("expert-aware-bytes", moved[PRICED_TREE] / moved[TREE]),
        worst("branches-beside-the-price", ms[PRICED_TREE] / ms[PRICED_CHAIN]),
    ]
