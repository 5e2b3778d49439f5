"""specter-beyond on made-up recordings, and its claims on rows with known answers."""

import pandas as pd
import pytest

from specter_lab.experiments.specter import beyond
from specter_lab.plan.step_costs import Transport
from tests.experiments import made_up


@pytest.fixture(autouse=True)
def recordings(monkeypatch):
    made_up.use(monkeypatch)


@pytest.fixture(scope="module")
def bits():
    return beyond.link_bits("qwen-nano")


def test_residual_bits_are_those_of_the_models_own_experts(bits):
    assert 8.5 < bits < 10


def test_every_switch_has_its_rows(bits, monkeypatch):
    monkeypatch.setattr(beyond, "link_bits", lambda model: bits)
    rows = pd.DataFrame(beyond.measure("qwen-nano", "", 0))
    shown = beyond.table(rows)
    assert list(shown.index) == [*beyond.SYSTEMS, beyond.PLANNED] and shown.notna().all(axis=None)
    fast = rows[(rows["by"] == beyond.SWITCH) & (rows["item"] == beyond.FAST)]
    assert (fast[beyond.RATIO] == 1).all()
    paper_depth = rows[(rows["by"] == beyond.FIXED) & (rows["item"] == "K = 8")]  # Qwen's K* is fast mode's
    assert paper_depth[beyond.MS].tolist() == fast[beyond.MS].tolist()
    found = {claim.id for claim in beyond.claims(rows)}
    assert len(found) == 6 and all(claim.value > 0 for claim in beyond.claims(rows))
    assert beyond.plot(rows).axes


def test_fewer_bits_are_fewer_bytes_and_a_slow_kernel_costs_time():
    from specter_lab.experiments.specter import offload

    traffic = offload.traffic("qwen-nano", 0)
    setting = beyond.Setting(offload.scene(traffic, profile=beyond.PROFILE), traffic)
    # A policy that plans once, after the draft: when it loads does not depend on how long its copies take.
    plain, half, slow = (
        setting.run("sp-l", transport=transport) for transport in (Transport(), Transport(8), Transport(8, 10))
    )
    assert half.rounds.h2d_bytes.sum() == pytest.approx(plain.rounds.h2d_bytes.sum() / 2)
    assert half.rounds.end_ms[-1] < plain.rounds.end_ms[-1] < slow.rounds.end_ms[-1]


def test_claims_name_the_worst_cell():
    cells = {
        ("a", "high"): (2.0, 1.0, 1.0, 1.0, 0.9, 0.5), ("a", "low"): (3.0, 1.0, 1.2, 1.1, 0.8, 1.0),
    }  # fmt: skip
    items = (beyond.PAPER_MODE, beyond.FAST, beyond.ONLINE, "uneven slots", beyond.RESIDUAL, beyond.PLANNED)
    rows = [
        {"model": model, "budget": budget, "family": "qwen", "by": beyond.SWITCH, "item": item, beyond.MS: ms, "link_bits": 8.0}
        for (model, budget), values in cells.items() for item, ms in zip(items, values)
    ] + [
        {"model": "a", "budget": budget, "family": "qwen", "by": beyond.FIXED, "item": "K = 2", beyond.MS: 1.0, "link_bits": 8.0}
        for budget in ("high", "low")
    ]  # fmt: skip
    found = {claim.id.split("/")[1]: claim for claim in beyond.claims(pd.DataFrame(rows))}
    assert found["online-near-best"].value == pytest.approx(1.2) and found["online-near-best"].note == "a, low budget"
    assert found["uneven-not-slower"].value == pytest.approx(1.1)
    assert found["over-paper-mode"].value == pytest.approx(3.0)  # the high budget is not where the link limits
    assert found["residual-gain"].value == pytest.approx(1 / 0.9)
    assert found["planner-near-best"].value == pytest.approx(1.0)
    assert found["residual-bytes"].value == pytest.approx(2.0)
