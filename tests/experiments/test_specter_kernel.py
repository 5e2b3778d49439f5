"""specter-kernel's claims and figure, from rows made up; its kernels are tested on a GPU."""

import pandas as pd
import pytest

from specter_lab.errors import UserError
from specter_lab.experiments import run
from specter_lab.experiments.specter import kernel


@pytest.fixture
def rows():
    times = {kernel.FUSED: 10.0, kernel.APART: 30.0, kernel.GROUPED: 20.0, kernel.TORCH: 25.0}
    shapes = {"small": (2048, 1408), "large": (4096, 6400)}
    found = [
        {"model": model, "hidden": hidden, "expert_width": width, "kernel": name, "tokens": 1, "measured_us": us * (1 if model == "small" else 8),
         "floor_us": us / 2}
        for model, (hidden, width) in shapes.items() for name, us in times.items()
    ]  # fmt: skip
    for model, (hidden, width) in shapes.items():
        for name in ("BF16 resident", "BF16 half resident"):
            found.append(
                {
                    "model": model,
                    "hidden": hidden,
                    "expert_width": width,
                    "kernel": name,
                    "tokens": 9,
                    "measured_us": 90.0,
                    "floor_us": 60.0,
                }
            )
    return pd.DataFrame(found)


def test_claims_are_read_off_the_rows(rows):
    per_expert, fused = kernel.claims(rows)
    assert per_expert.value == pytest.approx(20 / 30) and per_expert.n == 1  # the fine-grained size only
    assert fused.value == pytest.approx(3.0) and fused.n == 2


def test_the_figure_has_both_panels(rows):
    assert [len(axis.patches) for axis in kernel.plot(rows).axes] == [8, 4]


def test_without_a_gpu_it_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="there is none"):
        kernel.run(run.context_for("specter-kernel", tier="gpu", seed=0))
