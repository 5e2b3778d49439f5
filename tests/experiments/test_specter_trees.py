"""specter-trees on a few short requests, and its claims on rows with known answers."""

import numpy as np
import pandas as pd
import pytest
import torch

from specter_lab.experiments.claims import Setting, judge_all
from specter_lab.experiments.specter import offload, routing, trees
from specter_lab.measure.tree_beliefs import Sharpened
from specter_lab.measure.tree_decode import DraftStep, TreeRound
from specter_lab.plan.serve import NEEDED

NEW_TOKENS = 12


@pytest.fixture
def few(monkeypatch, tmp_path):
    routing.ask.cache_clear()
    for module, name, value in (
        (trees, "REQUESTS_PER_SET", 1), (trees, "NODES", 4), (trees, "FIT_PLACES", 16), (offload, "HISTORY_PER_SET", 1),
        (offload, "NEW_TOKENS", NEW_TOKENS), (offload, "DRAFT", "rtn-int4"), (offload, "CACHE", tmp_path),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("decoding", trees.TEMPERATURES)
def test_every_system_has_its_rows(few, decoding):
    rows = pd.DataFrame(trees.measure("qwen-nano", "", decoding, 0))
    items = [
        trees.CHAIN,
        trees.BY_DRAFT,
        trees.AT_ONCE,
        trees.TREE,
        trees.PRICED_TREE,
        trees.PRICED_CHAIN,
        trees.BLIND_CHAIN,
    ]
    for budget in ("high", "low"):
        cells = rows[rows["budget"] == budget].set_index("item")
        assert list(cells.index) == items
        assert cells.loc[trees.CHAIN, trees.RATIO] == 1
        assert (cells["nodes_per_round"] <= 4).all() and (cells[trees.TOKENS] >= 1).all()
        assert (cells[trees.TOKENS] <= cells["nodes_per_round"] + 1).all()
        assert cells.loc[trees.CHAIN, "draft_steps_per_round"] == cells.loc[trees.CHAIN, "draft_reads_per_round"] == 4
        assert (cells[trees.PRICE] > 0).sum() == 3
    assert rows["equal_tokens"].dropna().tolist() == ([1.0, 1.0] if decoding == "greedy" else [])
    assert len(trees.table(rows, trees.MS)) == len(items)
    if decoding == "greedy":
        assert len(judge_all("specter-trees", trees.claims(rows), Setting("cpu"))) == 6
        assert trees.plot(rows).axes


def test_a_replayed_tree_pays_for_the_nodes_it_read_and_prefetches_those_that_stayed():
    scene = offload.empty_scene("qwen-nano", "low", profile=trees.PROFILE)
    experts = np.arange(16, dtype=np.int32).reshape(4, 1, 4)  # four nodes, one layer each
    steps = [(experts[:1], [True]), (experts[1:4], [True, True, False])]
    steps = tuple(DraftStep(read, np.full(read.shape, 0.25, np.float32), np.array(kept)) for read, kept in steps)
    found = trees.replayed([[TreeRound(steps, experts[:3], 1)]] * 2, scene, new_tokens=2)
    assert found.rounds.tokens.tolist() == [2, 2] and found.rounds.depth.tolist() == [2, 2]
    assert found.hits.counts[NEEDED] == 2 * 12 * scene.layers
    assert found.hits.draft_uses == 2 * 3 * 4 * scene.layers  # the node that lost its place is not told
    first = found.rounds.drafted_ms[0] - found.rounds.start_ms[0]
    assert first == pytest.approx(scene.costs.draft_pass_ms(1, 4) + scene.costs.draft_pass_ms(3, 12))


def test_the_price_is_link_time_per_expert_over_time_per_token():
    scene = offload.empty_scene("qwen-nano", "low", profile=trees.PROFILE)
    experts = np.arange(8, dtype=np.int32).reshape(2, 1, 4)
    step = DraftStep(experts[:1], np.full((1, 1, 4), 0.25, np.float32), np.array([True]))
    found = trees.replayed([[TreeRound((step,), experts, 1)]], scene, new_tokens=2)
    ms_per_token = (found.rounds.end_ms - found.rounds.start_ms).sum() / 2
    copies_ms = scene.costs.copy_ms * scene.layers * 8  # all of them, in an empty cache
    assert trees.price_of_experts(found, scene.layers) == pytest.approx(copies_ms / 8 / ms_per_token)


def test_experts_that_a_drafted_token_adds():
    tokens = np.array([[[0, 1]], [[0, 2]], [[3, 4]]], np.int32)  # three tokens of one layer: two experts, one, two more
    steps = tuple(DraftStep(token[None], np.ones((1, 1, 2), np.float32), np.array([True])) for token in tokens)
    assert trees.added_experts([[TreeRound(steps, tokens, 2)]]) == 1.5


def test_a_belief_is_fitted_to_the_decoding(few):
    asked = trees.ask("qwen-nano", 0)
    assert [part.shape for part in asked.known] == [torch.Size([5, 16]), torch.Size([5, NEW_TOKENS])]
    assert asked.decoded[0].shape == asked.known[0].shape and not torch.equal(asked.decoded[0], asked.known[0])
    belief = trees.fitted(asked, 0.0)
    assert isinstance(belief, Sharpened) and belief.scale < 1  # the draft is surer to be right than of its token
    sampled = trees.fitted(asked, 1.0)
    assert 0 < sampled.doubt < 0.5 and 0 < sampled.later < 1


def test_claims_name_the_worst_cell():
    items = (trees.CHAIN, trees.BY_DRAFT, trees.TREE, trees.PRICED_TREE, trees.PRICED_CHAIN)
    cells = {
        "greedy": ((7, 5, 6.9, 6, 6), (20, 26, 19, 18.5, 18.6)),
        "T = 1": ((7, 3, 7.1, 7, 7), (25, 50, 24, 25.5, 25)),
    }
    rows = pd.DataFrame([
        {"model": "a", "decoding": decoding, "budget": budget, "item": item, "n_requests": 25, trees.TOKENS: t, trees.MS: ms,
         trees.BYTES: 10 * ms, "equal_tokens": 0.99 if (decoding, item) == ("greedy", trees.PRICED_TREE) else None}
        for decoding, (tokens, times) in cells.items() for budget in ("high", "low")
        for item, t, ms in zip(items, tokens, times)
    ])  # fmt: skip
    found = {claim.id.split("/")[1]: claim for claim in trees.claims(rows)}
    assert found["greedy-exact"].value == 0.99 and found["greedy-exact"].n == 25 * 128
    assert (
        found["draft-probabilities-lose"].value == pytest.approx(5 / 7)
        and not found["draft-probabilities-lose"].simulated
    )
    assert (
        found["tree-gains-little"].value == pytest.approx(0.95)
        and found["tree-gains-little"].note == "a, greedy, high budget"
    )
    assert found["expert-aware-not-slower"].value == pytest.approx(25.5 / 25)
    assert found["expert-aware-bytes"].value == pytest.approx(25.5 / 24)
    assert found["branches-beside-the-price"].value == pytest.approx(25.5 / 25)
