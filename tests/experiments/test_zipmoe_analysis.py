"""ZipMoE's experiments without a runtime: rows of small runs, figures, and what they say about the claims."""

import pandas as pd
import pytest

from specter_lab.experiments.claims import NOT_RUN, Setting, claims_of, judge_all
from specter_lab.experiments.zipmoe import cache_planner, decompression, entropy, scheduler
from specter_lab.paths import ROOT

CPU = Setting("cpu")


def judged(module, name, rows):
    """Verdicts by short name; every claim of the experiment has one, and the figure can be drawn."""
    module.plot(rows)
    found = {v.id.split("/")[1]: v for v in judge_all(name, module.claims(rows), CPU)}
    assert found.keys() == {claim.id.split("/")[1] for claim in claims_of(name)}
    return found


def test_entropy(monkeypatch):
    monkeypatch.setattr(entropy, "CONTROL_WEIGHTS", 1_200_000)
    monkeypatch.setattr(entropy, "CODECS", ("lz4hc", "zstd-1", "huffman", "planes"))
    rows = pd.DataFrame([r for s in ("phi-nano", entropy.GAUSSIAN, entropy.UNIFORM) for r in entropy.measure(s, "", 0)])
    found = judged(entropy, "zipmoe-entropy", rows)
    table = entropy.sizes(rows)
    assert (table["floor"] < table["huffman"]).all() and (table["huffman"] < table["zstd-1"]).all()
    assert (table["zstd-1"] < table["lz4hc"]).all()
    assert found["gaussian-exponent"].verdict == "reproduced"
    assert f"planes (of stores) {table.loc[entropy.GAUSSIAN, 'planes']:.3f}" in found["gaussian-size@zstd"].why
    assert rows["exponent_bits"].between(2, 3).all() and rows["sign_bits"].between(0.99, 1).all()


def test_scheduler(monkeypatch):
    monkeypatch.setattr(scheduler, "INSTANCES", dict.fromkeys(scheduler.COUNTS, 4))
    rows = pd.DataFrame([r for m in scheduler.MACHINES for w in (1, 2) for r in scheduler.measure(m, w, 0)])
    found = judged(scheduler, "zipmoe-scheduler", rows)
    assert (rows["over_bound"] >= 1 - 1e-6).all() and (rows["over_optimum"].dropna() >= 1 - 1e-6).all()
    assert found["bound"].ours <= 1 and found["bound"].simulated
    assert rows.equals(
        pd.DataFrame([r for m in scheduler.MACHINES for w in (1, 2) for r in scheduler.measure(m, w, 0)])
    )


def test_cache_planner(monkeypatch):
    for name, value in {
        "TRAIN_PER_SET": 3,
        "HELD_OUT_PER_SET": 3,
        "NEW_TOKENS": 24,
        "POOL_SHARES": (0.25,),
        "RULE_REQUESTS": 4,
    }.items():
        monkeypatch.setattr(cache_planner, name, value)
    train, held_out = cache_planner.traces("phi-nano", 0)
    assert not set(train.request_ids) & set(held_out.request_ids)
    rows = pd.DataFrame(cache_planner.measure("phi-nano", "", 0))
    judged(cache_planner, "zipmoe-cache-planner", rows)
    found = cache_planner.distances(rows)
    null = found[(found["router"] == cache_planner.NULL) & (found["ranks"] == cache_planner.CAUSAL)]
    assert (null["predicted_hit_rate"] - 0.25).abs().max() < 0.05, (
        "by chance a quarter of the experts has a quarter of the uses"
    )
    trained = found[(found["router"] == cache_planner.TRAINED) & (found["ranks"] == cache_planner.CAUSAL)]
    assert trained["observed_hit_rate"].min() > 0.3
    assert set(cache_planner.rules(rows).columns) == set(cache_planner.RULES)
    rates = rows[rows["kind"] == "rule"].set_index(["router", "rule"])["hit_rate"]
    assert abs(rates[cache_planner.NULL, "lru"] - 0.25) < 0.05 < rates[cache_planner.TRAINED, "rank"] - 0.25
    for law in cache_planner.LAWS:
        assert cache_planner.laws(rows, law).groupby(["router", "ranks"])["predicted"].sum().round(3).eq(1).all()
    assert (cache_planner.plans(rows)["ratio"] >= 1 - 1e-9).all(), "pools planned for the wrong number are never better"


def test_decompression(monkeypatch, out):
    monkeypatch.setattr(decompression, "CODECS", ("zstd-1", "planes"))
    monkeypatch.setattr(decompression, "THREADS", (1, 2))
    rows = pd.DataFrame(decompression.measure("", ""))
    found = judged(decompression, "zipmoe-decompression", rows)
    assert found["one-core"].ours > 0.3
    speeds = decompression.decoded(rows).set_index(["codec", "threads"])[["gb_s", "low_gb_s", "high_gb_s"]]
    needed, cores = decompression.output_rate_to_match(rows, "zstd-1"), min(2, int(rows["cores"].max()))
    for claim, threads, over in (("one-core", 1, 1), ("two-cores", 2, 1), ("keeps-up", cores, needed)):
        beside = "zstd-1: {:.2f} [{:.2f}, {:.2f}]".format(*speeds.loc[("zstd-1", threads)] / over)
        assert beside in found[claim].why and "planes" in found[claim].why
    rows.loc[rows["kind"] == decompression.READ, "gb_s"] = 1e-3
    assert decompression.crossover(rows, "planes") == 1
    rows.loc[rows["kind"] == decompression.READ, "gb_s"] = 1e6
    assert decompression.crossover(rows, "planes") is None
    crossover = judged(decompression, "zipmoe-decompression", rows)["crossover"]
    assert crossover.verdict == NOT_RUN and "not even" in crossover.why


@pytest.mark.parametrize("module", [cache_planner, entropy])
def test_inputs_name_the_models(module):
    from specter_lab.experiments.run import context_for

    context = context_for("zipmoe-entropy", tier="cpu", seed=0)
    assert {"qwen-nano", "phi-nano", "deepseek-nano"} <= module.inputs(context).keys()


def test_examples_are_packed_into_folders_that_name_the_codec():
    """Else another default finds the store of the last one, and refuses."""
    notebooks = [path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("zipmoe-*.ipynb")]
    stores = [line for text in notebooks for line in text.splitlines() if '"store = ' in line]
    assert len(stores) == 6 and all("{DEFAULT_CODEC}" in line for line in stores)
