"""specter-engine's rows, claims and figure, on a CPU: the same code, with a machine's numbers from its profile."""

from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from specter_lab.engine import records
from specter_lab.engine.bench import Pass
from specter_lab.engine.weights import load_weights
from specter_lab.experiments.specter import engine, engine_batch, engine_machine, engine_runs
from specter_lab.experiments.specter.engine_tables import limits
from specter_lab.experiments.specter.peers import ACCELERATE
from specter_lab.plan.hardware import read_profile
from specter_lab.plan.replay import Replay

MACHINE = engine_machine.Machine(
    read_profile("h200-pcie5"), 50.0, [Pass("draft step", 1.5, 10**9, 0.8)], 3.0, 0.05, 0.08
)


@pytest.fixture(scope="module")
def rows():
    """Both budgets of a small model."""
    weights = load_weights("qwen-nano", device="cpu")
    prompts = dict(zip(("prose", "code"), torch.randint(3, 2000, (2, 16), generator=torch.Generator().manual_seed(0))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_runs, "USUAL_TOKENS", 6)
        patch.setattr(engine_runs, "REPEATS", 2)
        patch.setattr(engine_runs, "PROMPT_SETS", ("prose", "code"))
        found = [
            row
            for budget, slots in (("high", 15), ("low", 8))
            for row in of_budget(engine_runs.Bench(weights, "qwen-nano", budget, slots, prompts, MACHINE, 0))
        ]
        patch.setattr(engine_runs, "EXACT_TOKENS", 8)
        patch.setattr(engine_runs, "_prompts", lambda *_: prompts)
        found += engine_runs.exact_rows("qwen-nano", "", 0)
        batch = {"BATCHES": (1, 2, 3), "FEWEST_REQUESTS": 2, "USUAL_TOKENS": 10, "BATCHED": ("specter", "specmoeoff")}
        for name, value in batch.items():
            patch.setattr(engine_batch, name, value)
        for name in engine_batch.BATCHED:
            found += engine_batch.of_system(weights, "qwen-nano", name, 15, [*prompts.values()] * 2, 0)
    found += [{"by": "pass", "item": item, "measured_ms": 1.5, "floor_ms": 1.0} for item in ("draft step", "verify 9")]
    found += [{"by": "peer", "item": ACCELERATE, "measured_ms_per_token": 900.0, "n_tokens": 4, "title": "slow 1.0"}]
    return pd.DataFrame(found).assign(model="qwen-nano", family="qwen", original="Qwen1.5-MoE-A2.7B")


def of_budget(bench):
    names = [name for name in engine_runs.SYSTEMS if bench.budget == "high" or name != engine_runs.RESIDENT]
    yield from bench.rows({name: bench.contender(name) for name in names}, bench.repeats)
    if bench.budget == "high":
        yield from (row | {"by": "part"} for row in bench.rows(bench.parts(), 1))
        yield from (row | {"by": "precision"} for row in bench.rows(bench.spoilt(), 1))


def test_every_system_has_its_rows(rows):
    systems = rows[rows["by"] == "system"]
    assert set(systems["item"]) == set(engine_runs.SYSTEMS)
    assert set(systems.groupby(["item", "budget"]).size()) == {2 * 3}
    lru = systems[systems["item"] == "lru"]
    assert (lru["tokens_per_round"] == 1).all() and (lru["read_through_mb_per_token"] == 0).all()
    assert (systems.loc[systems["item"] == "specmoeoff", "tokens_per_round"] > 1).all()
    equal = systems.groupby(["item", "budget", "prompt_set"])["n_tokens"].nunique()
    assert (equal.drop([*engine_runs.ONLINE_DEPTH], level="item") == 1).all()  # repeats decode the same tokens


def test_the_simulator_runs_the_same_rounds(rows):
    simulated = rows["simulated_ms_per_token"].dropna()
    assert len(simulated) == 2 * (2 * len(engine_runs.SYSTEMS) - 1) + 5 + 4 and (simulated > 0).all()


def test_claims_and_figure(rows):
    found = {measured.id: measured for measured in engine.claims(rows)}
    assert found["specter-engine/exact@fast"].value == found["specter-engine/exact@paper"].value == 1.0
    assert found["specter-engine/draft-step"].value == 1.5 and found["specter-engine/over-accelerate"].value > 0
    assert found["specter-engine/over-llama-cpp"].value is None
    assert 0 < found["specter-engine/compute-share"].value < 1
    assert len(limits(rows)) == 2 * (len(engine_runs.SYSTEMS) - 1)
    assert len(engine.plot(rows).axes) == 2


@pytest.mark.parametrize("refused", engine_runs.SYSTEMS)
def test_claims_and_figure_where_a_system_was_refused(rows, refused):
    left = rows[rows["item"] != refused]
    assert {measured.id for measured in engine.claims(left)} == {measured.id for measured in engine.claims(rows)}
    assert engine.plot(left).axes


def test_batches(rows):
    found = rows[rows["by"] == "batch"]
    assert set(found.groupby("item").size()) == {3} and set(found["item"]) == {"specter", "specmoeoff"}
    assert (found["n_tokens"] == 10 * found["n_requests"]).all()
    alone = found[found["batch"] == 1]
    assert (found["n_rounds"].to_numpy().reshape(-1, 3)[:, 2] < 2 * alone["n_rounds"].to_numpy()).all()
    inflation, over = engine_batch.claims(rows)
    assert inflation.value > 0 and over.value > 0 and "B = 3 over B = 1" in inflation.note and "B = 2" in over.note
    none, _ = engine_batch.claims(rows[rows["by"] != "batch"])
    assert none.value is None


def test_parts_spoilt_plans_and_one_round(rows):
    parts = rows[rows["by"] == "part"].groupby("item")["link_mb_per_token"].mean()
    assert set(parts.index) == {*engine_runs.PARTS, engine_runs.NO_PREFETCH}
    spoilt = rows[(rows["by"] == "precision") & (rows["prompt_set"] == "all")].set_index("item")
    assert spoilt.loc["specter @ 0.41", "hit_rate"] < spoilt.loc["specter @ 0.7", "hit_rate"]
    work = rows[rows["by"] == "work"]
    assert set(work["item"]) == set(engine_runs.DRAWN) and (work["measured_end_ms"] >= work["measured_start_ms"]).all()


def test_a_system_that_memory_does_not_hold_is_a_row_that_says_so(monkeypatch):
    monkeypatch.setattr(records.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    bench = engine_runs.Bench(load_weights("qwen-nano", device="cpu"), "qwen-nano", "low", 8, {}, MACHINE, 0)
    residual = "specter-shared, residual transport"
    rows = bench.group_rows([residual])
    assert [(row["by"], row["item"]) for row in rows] == [(engine_runs.REFUSED, residual)]
    assert "of host memory" in rows[0]["title"]


def test_a_replay_says_what_was_recorded():
    replay, draw = Replay(num_experts=8, layers=4), torch.Generator().manual_seed(0)
    replay.begin_request()
    used = torch.randint(8, (2, 3, 1), generator=draw).numpy()
    replay.add(1, used.transpose(1, 0, 2)[:2], used.transpose(1, 0, 2)[:2] * 0.5, used)
    replay.add(2, used.transpose(1, 0, 2)[:2], used.transpose(1, 0, 2)[:2] * 0.5, used)
    assert replay.requests == 1 and replay.windows.positions == 5
    second = replay.round([0], [2], depth=7)
    assert second.accepted == (2,) and [step.shape for step in second.drafted] == [(1, 4, 1)] * 2
    assert sorted(set(used[0].ravel())) == second.needs.experts[: second.needs.first[1]].tolist()
