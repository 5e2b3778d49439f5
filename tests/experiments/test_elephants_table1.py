"""elephants-table1's claims and figure, from rows made up; its kernels are tested on a GPU."""

import pandas as pd
import pytest

from specter_lab.errors import UserError
from specter_lab.experiments import run
from specter_lab.experiments.claims import claims_of
from specter_lab.experiments.elephants import table1

BITS = {table1.HALF: 16, "int8 native": 8, "int8 I2F": 8, "int4 I2F": 4}


@pytest.fixture
def rows():
    """Kernels that need 2 us and the time of their bytes at half the copy's rate."""
    found = []
    for kernel, bits in BITS.items():
        for active in table1.ACTIVE:
            read = active * 1024 * 4096 * bits / 8e6
            found.append({"shape": table1.PAPER_SHAPE, "dtype": "fp16", "kernel": kernel, "tokens": 40, "active": active, "cache": "cold",
                          "time_us": 2 + read / 2.0, "time_low_us": 1.9 + read / 2.0, "time_high_us": 2.1 + read / 2.0, "floor_us": read / 4.0, "read_mb": read, "copy_gb_s": 4000.0})  # fmt: skip
    return pd.DataFrame(found)


def test_every_claim_has_a_value(rows):
    found = {measured.id: measured for measured in table1.claims(rows)}
    assert set(found) == {claim.id for claim in claims_of("elephants-table1")}
    assert found["elephants-table1/int4-optimised@32"].value == pytest.approx((2 + 134.2) / (2 + 33.55), rel=1e-2)
    mean = found["elephants-table1/geometric-mean@int8-native"]
    assert 1 < mean.low < mean.value < mean.high < 2


def test_kernels_are_the_kernels():
    from specter_lab.engine.kernels.channel_gemm import KINDS

    assert {table1.HALF, *table1.NAMES} == set(KINDS)


def test_the_most_is_the_ratio_of_bytes(rows):
    traffic = table1.of_traffic(rows)
    assert (traffic < 1).all().all() and (traffic[32] > traffic[1]).all()


def test_the_figure_has_the_papers_lines(rows):
    left, right = table1.plot(rows).axes
    assert len(left.get_legend_handles_labels()[1]) == 6 and len(right.get_lines()) == 4


def test_without_a_gpu_it_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="there is none"):
        table1.run(run.context_for("elephants-table1", tier="gpu", seed=0))
