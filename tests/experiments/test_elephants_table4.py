"""elephants-table4: the arithmetic and what follows from it."""

import pytest

from specter_lab.errors import UserError
from specter_lab.experiments import run
from specter_lab.experiments.claims import NOT_REPRODUCED, NOT_RUN, REPRODUCED, Setting, claims_of, judge_all
from specter_lab.experiments.elephants import table4


@pytest.fixture
def rows():
    return table4.run(run.context_for("elephants-table4", tier="cpu", seed=0))


def test_three_costs_follow_and_the_small_models_needs_an_eighth(rows):
    by_name = rows.set_index("name")
    off = by_name["cost_over_stated"]
    assert off.drop(table4.SMALL).between(0.995, 1.005).all()
    assert off[table4.SMALL] / table4.UNSTATED == pytest.approx(1, abs=0.005)
    assert (rows["cost_low"] < rows["cost"]).all() and (rows["cost"] < rows["cost_high"]).all()


def test_verdicts(rows):
    verdicts = {
        v.id.split("/")[1]: v.verdict for v in judge_all("elephants-table4", table4.claims(rows), Setting("cpu"))
    }
    assert verdicts["cost-small-model"] == NOT_REPRODUCED and verdicts["saving"] == REPRODUCED
    assert {verdicts[f"cost@{name}"] for name in ("avx512-5.32B", "t4-batch20", "t4-batch64")} == {REPRODUCED}
    assert verdicts["t4-latency@20"] == NOT_RUN and len(verdicts) == len(claims_of("elephants-table4"))


def test_a_million_words(rows):
    """351 words/s are 923 million a month, for 587.65 dollars."""
    assert table4.usd_per_million_words(587.65, 351) == pytest.approx(587.65 / 923.1, rel=1e-3)


def test_the_readers_machine(rows):
    table = table4.against(rows, 100.0, 1000.0)
    assert table.loc["yours", "cost"] == 0.1 and table.loc["yours", "yours_over_it"] == 1
    assert table.loc["t4-batch64", "yours_over_it"] == pytest.approx(0.1 / (390.55 / 2560))
    with pytest.raises(UserError, match="positive"):
        table4.against(rows, 100.0, 0)


def test_the_figure_shows_both_costs(rows):
    assert len(table4.plot(rows).axes[0].patches) == 8
