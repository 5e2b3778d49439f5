"""A batch writes what each request would write alone, whoever joins and leaves beside it."""

import pytest
import torch

from specter_lab.engine import api
from specter_lab.engine.batch import _side_by_side
from specter_lab.errors import UserError
from tests.engine.test_engine import DEVICES, MODELS, engine_of

TEXTS = (
    "The old man walked",
    "def main():\n    return",
    "Once upon a time there was a king who",
    "2 + 2 =",
    "- No!\n- Yes",
)


def prompts_of(engine: api.Engine) -> list[torch.Tensor]:
    return [torch.tensor(engine.tokenizer(text)["input_ids"]) for text in TEXTS]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["paper", "fast"])
@pytest.mark.parametrize("model", MODELS)
def test_greedy_texts_are_those_of_each_alone(model, mode, device):
    """Four requests of unequal lengths and depths over two lanes."""
    engine = engine_of(model, 6, device, mode=mode)
    prompts, limits, depths = prompts_of(engine)[:4], (7, 2, 12, 1), (3, 0, 5, None)
    found = engine.generate_batch(prompts, limits, depth=depths, lanes=2, ignore_eos=True)
    for ids, limit, text in zip(prompts, limits, found):
        assert torch.equal(text, engine.generate(ids, limit, depth=0, ignore_eos=True))


@pytest.mark.parametrize("device", DEVICES)
def test_prompts_of_neighbours_are_read_side_by_side(device, monkeypatch):
    """Of 80, 2, 9 and 33 tokens, in pieces of four each; the lanes in the middle join a second time."""
    monkeypatch.setattr("specter_lab.engine.session.PREFILL_TOKENS_OF_ALL", 16)
    engine = engine_of("qwen-nano", 6, device, mode="paper")
    long = torch.tensor(engine.tokenizer(" ".join(TEXTS * 8))["input_ids"])
    prompts, limits = [long[:80], long[:2], long[5:14], long[:33], long[3:20], long[9:12]], (9, 2, 2, 9, 5, 5)
    found = engine.generate_batch(prompts, limits, depth=2, lanes=4, ignore_eos=True)
    for ids, limit, text in zip(prompts, limits, found):
        assert torch.equal(text, engine.generate(ids, limit, depth=0, ignore_eos=True))


def test_a_long_prompt_is_not_read_beside_short_ones():
    assert _side_by_side([0, 1, 2, 4, 5], [10, 12, 40, 41, 9]) == [[0, 1], [2], [4], [5]]
    assert _side_by_side([], []) == []


def test_samples_are_those_of_each_alone():
    """On a CPU: a GPU's draft adds in another order with several lanes, so that its samples follow the same law only."""
    engine = engine_of("qwen-nano", 6, mode="paper")
    prompts = prompts_of(engine)[:3]
    found = engine.generate_batch(prompts, 8, temperature=1.0, depth=4, seed=7, lanes=2)
    for number, (ids, text) in enumerate(zip(prompts, found)):
        assert torch.equal(text, engine.generate(ids, 8, temperature=1.0, depth=4, seed=7 + number))


def test_a_shallow_lane_beside_a_deep_one_keeps_its_depth():
    engine = engine_of("qwen-nano", 6, mode="paper")
    engine.generate_batch(prompts_of(engine)[:2], 12, depth=(1, 8), lanes=2, ignore_eos=True)
    together = engine.stats.drafted, engine.stats.accepted
    alone = []
    for ids, depth in zip(prompts_of(engine)[:2], (1, 8)):
        engine.stats = api.Meter()
        engine.generate(ids, 12, depth=depth, ignore_eos=True)
        alone.append((engine.stats.drafted, engine.stats.accepted))
    assert together == tuple(map(sum, zip(*alone)))


def test_lanes_share_what_is_missing():
    """Five copies of a prompt need the experts of one."""
    engine = engine_of("qwen-nano", 8, mode="paper", policy="lru")
    ids = prompts_of(engine)[0]
    engine.generate(ids, 12, ignore_eos=True)
    alone, engine.stats = engine.stats, api.Meter()
    engine.generate_batch([ids] * 5, 12, ignore_eos=True)
    assert engine.stats.tokens == 5 * alone.tokens and engine.stats.needed == alone.needed
    assert engine.stats.rounds == alone.rounds


def test_pieces_come_as_they_are_written_and_text_gives_text():
    engine = engine_of("qwen-nano", 6)
    pieces = list(engine.generate_batch(TEXTS[:3], 10, depth=2, lanes=2, stream=True, ignore_eos=True))
    assert [number for number, _ in pieces[:2]] == [0, 1] and pieces[-1][0] == 2
    assert all(sum(len(tokens) for n, tokens in pieces if n == number) == 10 for number in range(3))
    texts = engine.generate_batch(TEXTS[:3], 10, depth=2, lanes=2, ignore_eos=True)
    assert texts == [engine.generate(text, 10, depth=2, ignore_eos=True) for text in TEXTS[:3]]


def test_temperatures_side_by_side():
    engine = engine_of("qwen-nano", 6, mode="paper")
    prompts, warmths = prompts_of(engine)[:3], (0.0, 1.0, 0.7)
    found = engine.generate_batch(prompts, 8, temperature=warmths, depth=3, seed=7, lanes=3)
    for number, (ids, warmth, text) in enumerate(zip(prompts, warmths, found)):
        assert torch.equal(text, engine.generate(ids, 8, temperature=warmth, depth=3, seed=7 + number))


def test_who_is_no_longer_wanted_leaves_and_another_joins():
    engine = engine_of("qwen-nano", 6, mode="paper")
    first, second, late = prompts_of(engine)[:3]
    gone, how = set(), {"temperature": 0.0, "depth": 2, "seed": 0, "ends": frozenset()}
    leaving = engine.request(first, 50, wanted=lambda: "first" not in gone, **how)
    staying, joining = (engine.request(ids, 12, **how) for ids in (second, late))
    asked = [leaving, staying, joining]
    written = {id(each): [] for each in asked}
    pieces = engine.batch(engine.session_for(100, 2, 0.0, 2), lambda: asked.pop(0) if asked else None)
    for piece in pieces:
        written[id(piece.request)] += piece.tokens
        if len(written[id(leaving)]) > 2:
            gone.add("first")
    assert 2 < len(written[id(leaving)]) < 9
    for each, ids in ((staying, second), (joining, late)):
        assert written[id(each)] == engine.generate(ids, 12, depth=0, ignore_eos=True)[0, len(ids) :].tolist()


def test_a_lane_that_is_free_stays_in_its_own_part_of_the_cache(monkeypatch):
    """The first lane ends with its cache full; what it computes afterwards must reach no other lane."""
    monkeypatch.setattr(api, "SESSION_TOKENS", 1)
    engine = engine_of("qwen-nano", 6, mode="paper")
    long, short = prompts_of(engine)[2], prompts_of(engine)[0]
    found = engine.generate_batch([long, short], (4, 4 + len(long) - len(short)), depth=8, lanes=2, ignore_eos=True)
    for ids, text in zip((long, short), found):
        assert torch.equal(text, engine.generate(ids, len(text[0]) - len(ids), depth=0, ignore_eos=True))


def test_an_end_token_frees_its_lane(monkeypatch):
    engine = engine_of("qwen-nano", 6, mode="paper")
    prompts = prompts_of(engine)[:3]
    expected = [engine.generate(ids, 12, depth=0, ignore_eos=True)[0, len(ids) :].tolist() for ids in prompts]
    end = expected[0][4]
    monkeypatch.setattr(engine.weights.config, "eos_token_id", end)
    found = engine.generate_batch(prompts, 12, depth=3, lanes=2)
    for ids, text, whole in zip(prompts, found, expected):
        cut = whole[: whole.index(end) + 1] if end in whole else whole
        assert text[0, len(ids) :].tolist() == cut


def test_what_cannot_be():
    engine = engine_of("qwen-nano", 6)
    with pytest.raises(UserError, match="at least one prompt and one lane"):
        engine.generate_batch([])
    with pytest.raises(UserError, match="32 windows of 9 are more"):
        engine.generate_batch(list(TEXTS) * 10, depth=8)
    with pytest.raises(UserError, match="66 lanes"):
        api.engine_for(engine.weights, expert_budget=6, in_slots=True, mode="paper").generate_batch(
            list(TEXTS) * 20, lanes=66, depth=1
        )
    with pytest.raises(UserError, match="2 temperatures for 3 prompts"):
        engine.generate_batch(TEXTS[:3], temperature=(0.0, 1.0))
    with pytest.raises(UserError, match="at least 2 tokens"):
        engine.generate_batch([torch.tensor([5])])
