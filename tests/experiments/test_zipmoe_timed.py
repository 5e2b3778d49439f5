"""ZipMoE's timed experiments end to end on small stores: rows, figures, claims. Times mean nothing here; counters do."""

import pandas as pd
import pytest

from specter_lab.compress.bench_bitfield import expert_tensor
from specter_lab.compress.bitfield import encode
from specter_lab.compress.codecs import codec
from specter_lab.engine.store.pack import DEFAULT_CODEC
from specter_lab.errors import UserError
from specter_lab.experiments.claims import NOT_RUN, Setting, claims_of, judge_all
from specter_lab.experiments.run import context_for
from specter_lab.experiments.zipmoe import (
    io_stall,
    latency_length,
    latency_memory,
    page_cache,
    sentences,
    setting,
    table1,
    throughput_batch,
)
from specter_lab.experiments.zipmoe.peers import THEIR_OWN
from specter_lab.experiments.zipmoe.timed import LOAD, ZIP
from specter_lab.models.zoo.translation import END

SMALL = {
    "qwen-nano": dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=4, moe_intermediate_size=32,
                      shared_expert_intermediate_size=128),
    "deepseek-nano": dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=4, moe_intermediate_size=32,
                          kv_lora_rank=64),
    "switch-nano": dict(d_model=512, d_ff=128),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small(tmp_path_factory):
    """Stores of 24 MB, short history; made once for all tests of this file, none of which writes to them."""
    made = (setting.wide, setting.history, setting.popularity, setting.prompts)
    folder = tmp_path_factory.mktemp("zipmoe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setting, "WIDE", SMALL)
        patch.setattr(setting, "HISTORY_PER_SET", 2)
        patch.setattr(setting, "HISTORY_TOKENS", 16)
        patch.setattr(setting, "scratch", lambda: folder)
        for cached in made:
            cached.cache_clear()
        yield
    for cached in made:
        cached.cache_clear()


@pytest.fixture(autouse=True)
def elsewhere(out):
    """Whatever else is written goes to a folder of the test's own."""


def judged(module, name, rows):
    """Verdicts by short name; every claim of the experiment has one, and the figure can be drawn."""
    module.plot(rows)
    found = {v.id.split("/")[1]: v for v in judge_all(name, module.claims(rows), Setting("cpu"))}
    assert found.keys() == {claim.id.split("/")[1] for claim in claims_of(name)}
    return found


def measured_by(module, *models):
    return pd.DataFrame([row for model in models for row in module.measure(model, "", 0)])


def budgets_hold(rows):
    assert (rows["slab_mb"] <= rows["budget_mb"] + 0.05).all()
    assert (rows.loc[rows["system"] == LOAD, "hit_share"] == 0).all()


def test_another_codec_is_another_store_of_the_same_model(monkeypatch):
    folder, store, rows = (name("qwen-nano") for name in (setting._folder, setting._store, setting._digest))
    monkeypatch.setattr(setting, "DEFAULT_CODEC", "huffman")
    assert setting._folder("qwen-nano") == folder and setting._store("qwen-nano") != store
    assert setting._digest("qwen-nano") != rows


def test_wide_models_compress_like_trained_ones():
    ready = setting.wide("qwen-nano")
    trained = expert_tensor("qwen-nano")
    share = encode(trained, codec(DEFAULT_CODEC)).stored_bytes / trained.nbytes
    assert 0.65 < share < 0.72 and ready.index.stored_share == pytest.approx(share, abs=0.01)
    assert setting.wide("qwen-nano") is ready and ready.index.expert_bytes == 6 * 512 * 32


def test_latency_memory(monkeypatch):
    monkeypatch.setattr(latency_memory, "SHARES", (0.25, 0.5))
    monkeypatch.setattr(latency_memory, "REPEATS", 1)
    monkeypatch.setattr(latency_memory, "NEW_TOKENS", 4)
    rows = measured_by(latency_memory, "qwen-nano", "switch-nano")
    budgets_hold(rows)
    found = judged(latency_memory, "zipmoe-latency-memory", rows)
    assert found["encoder-decoder-tpot@largest"].n == 2 * found["twice"].n == 2
    hits = rows.groupby(["model", "system", "budget_share"])["hit_share"].mean()
    assert all(hits[model, ZIP, 0.5] > hits[model, ZIP, 0.25] > 0 for model in ("qwen-nano", "switch-nano"))
    alone = judged(latency_memory, "zipmoe-latency-memory", rows[rows["model"] == "qwen-nano"])
    assert alone["encoder-decoder-tpot@smallest"].verdict == NOT_RUN
    assert "no encoder-decoder model" in alone["encoder-decoder-tpot@smallest"].why


def test_throughput_batch(monkeypatch):
    monkeypatch.setattr(throughput_batch, "BATCHES", (1, 4))
    monkeypatch.setattr(throughput_batch, "REPEATS", 1)
    monkeypatch.setattr(throughput_batch, "NEW_TOKENS", {1: 3, 4: 3})
    rows = measured_by(throughput_batch, "deepseek-nano", "switch-nano")
    budgets_hold(rows)
    found = judged(throughput_batch, "zipmoe-throughput-batch", rows)
    assert 2 * found["decoder@smallest"].n == found["encoder-decoder@smallest"].n == 2
    sums = rows[rows["system"] == LOAD].groupby(["model", "batch"])[["read_mb", "tokens"]].sum()
    read = sums["read_mb"] / sums["tokens"]
    assert all(read[m, 4] < read[m, 1] for m in ("deepseek-nano", "switch-nano")), "a batch shares reads"


def test_latency_length(monkeypatch):
    monkeypatch.setattr(latency_length, "LENGTHS", (2, 4, 30))
    monkeypatch.setattr(latency_length, "REPEATS", 1)
    rows = measured_by(latency_length, "qwen-nano", "switch-nano")
    budgets_hold(rows)
    found = judged(latency_length, "zipmoe-latency-length", rows)
    assert found["encoder-decoder@largest"].n == 2
    lengths = rows.groupby("model")["new_tokens"].unique().map(set)
    assert lengths["qwen-nano"] == {2, 4, 30} and lengths["switch-nano"] == {2, 4}, "no longer than a translation"


def test_table1(monkeypatch):
    monkeypatch.setattr(table1, "REPEATS", 1)
    monkeypatch.setattr(table1, "NEW_TOKENS", 8)
    rows = measured_by(table1, "qwen-nano", "deepseek-nano")
    budgets_hold(rows)
    assert list(dict.fromkeys(rows["system"])) == list(table1.ROWS)
    found = judged(table1, "zipmoe-table1", rows)
    assert found["qwen-speedup@planner"].n == 1 and "codec off" in found["stages-in-order"].aside
    read = rows.groupby("system")["read_mb"].sum()
    assert read["core"] < 0.8 * read[LOAD] and read["planner"] < read["codec off"]


def test_io_stall(monkeypatch):
    monkeypatch.setattr(io_stall, "REPEATS", 1)
    monkeypatch.setattr(io_stall, "NEW_TOKENS", 4)
    rows = measured_by(io_stall, "qwen-nano", "switch-nano")
    assert set(rows["tier"]) == {io_stall.FAST, io_stall.SLOW} and rows["stall_share"].between(0, 1).all()
    judged(io_stall, "zipmoe-io-stall", rows)


def test_page_cache(monkeypatch):
    monkeypatch.setattr(page_cache, "REPEATS", 1)
    monkeypatch.setattr(page_cache, "NEW_TOKENS", 3)
    rows = measured_by(page_cache, "qwen-nano", "switch-nano")
    assert set(rows["cache"]) == set(page_cache.CACHES)
    there = {"model": "qwen-nano", "system": "DeepSpeed ZeRO-3", "cache": THEIR_OWN, "ttft_ms": 9.0, "tpot_ms": 3.0}
    rows = pd.concat([rows, pd.DataFrame([there, {"system": "MoE-Infinity", "note": "not run: absent"}])])
    found = judged(page_cache, "zipmoe-page-cache", rows)
    assert found["warm"].n == 2 and found["advantage-kept"].verdict == NOT_RUN


def test_models_that_cannot_be_widened_are_refused():
    context = context_for("zipmoe-table1", tier="cpu", seed=0, models=["dense-nano"])
    with pytest.raises(UserError, match="MODELS="):
        table1.inputs(context)


def test_the_translator_is_measured_where_the_paper_has_one():
    for module, models in ((latency_memory, setting.WITH_TRANSLATOR), (table1, setting.DECODERS)):
        name = f"zipmoe-{module.__name__.split('.')[-1].replace('_', '-')}"
        read = module.inputs(context_for(name, tier="cpu", seed=0, models=[]))
        assert {key for key in read if key.endswith("-nano")} == set(models)
        assert ("test.jsonl" in read) == ("switch-nano" in models)


def test_sentences_are_whole_and_not_those_of_the_history():
    asked, earlier = (sentences.sources("switch-nano", part, 16, 0) for part in (sentences.ASKED, sentences.EARLIER))
    assert asked.shape == earlier.shape == (16, sentences.SOURCE_TOKENS)
    assert (asked[:, -1] == END).all() and (asked[:, :-1] > END).all()
    assert not {tuple(row) for row in asked.tolist()} & {tuple(row) for row in earlier.tolist()}
    with pytest.raises(UserError, match="sentences of 24 tokens were found"):
        sentences.sources("switch-nano", sentences.ASKED, 10_000, 0)


def test_a_translators_history_is_its_routing_layer_by_layer():
    used = sentences.routing("switch-nano", 3, 0)
    assert [len(layer) for layer in used] == [3 * sentences.SOURCE_TOKENS] * 3
    alone = sentences.routing("switch-nano", 1, 0)  # the first of the same sentences
    agree = [(layer[: len(one)] == one).mean() for layer, one in zip(used, alone)]
    assert min(agree) > 0.9, "a batch rounds otherwise, but rows are sentence by sentence"
