"""elephants-table3's claims and figure, from rows made up; the translator is tested on a GPU."""

import pandas as pd
import pytest

from specter_lab.errors import UserError
from specter_lab.experiments import run
from specter_lab.experiments.claims import claims_of
from specter_lab.experiments.elephants import table3


@pytest.fixture
def rows():
    """The paper's own speeds at beam 1, and half of them at beam 2."""
    found = []
    for system, values in table3.PAPER.items():
        for beam in (1, 2):
            for batch, speed in zip(table3.BATCHES, values):
                seconds = 32 * batch / speed * beam
                found.append({"system": system, "batch": batch, "beam": beam, "seconds": seconds, "seconds_low": 0.98 * seconds,
                              "seconds_high": 1.03 * seconds, "repeats": 5, "input_tokens_s": 32 * batch / seconds})  # fmt: skip
    return pd.DataFrame(found)


def test_the_papers_speeds_give_the_papers_ratios(rows):
    found = {measured.id: measured for measured in table3.claims(rows)}
    claims = {claim.id: claim for claim in claims_of("elephants-table3") if not claim.missing}
    assert set(found) == set(claims)
    for name, measured in found.items():
        if "headline" not in name:
            assert measured.value == pytest.approx(claims[name].value, rel=0.005)
        assert measured.low < measured.value < measured.high and measured.n == 5


def test_the_figure_has_all_systems_and_ratios(rows):
    left, right = table3.plot(rows).axes
    assert len(left.get_lines()) == 8 and len(right.get_lines()) == 6


def test_systems_are_the_benchs():
    from specter_lab.engine import bench_translate

    assert table3.SYSTEMS == bench_translate.SYSTEMS and table3.BATCHES == bench_translate.BATCHES


def test_without_a_gpu_it_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="there is none"):
        table3.run(run.context_for("specter-kernel", tier="gpu", seed=0))
