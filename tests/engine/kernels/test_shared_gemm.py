"""A large layer by way of shared memory against torch, on the GPU; `test_channel_gemm` has the grouped product."""

import pytest
import torch

from tests.engine.kernels.inputs import normal, relative_error

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 64, 8), (1, 64, 300), (64, 128, 128), (96, 1024, 32128), (200, 64, 257)])  # fmt: skip
def test_it_is_torchs(rows, inputs, outputs, dtype):
    from specter_lab.engine.kernels import shared_gemm

    x, weight = normal(rows, inputs, dtype=dtype), normal(outputs, inputs, scale=0.1, dtype=dtype)
    found = shared_gemm.linear(x.cuda(), weight.cuda())
    assert found.dtype == dtype and found.shape == (rows, outputs)
    if rows:
        assert (
            relative_error(found, x.float() @ weight.float().t()) < {torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
        )


def test_what_it_cannot_read_is_refused():
    from specter_lab.engine.kernels import shared_gemm

    half = torch.zeros(4, 128, device="cuda", dtype=torch.float16)
    for x, weight in (
        (half.float(), half.float()),
        (half, half.bfloat16()),
        (half[:, :70].contiguous(),) * 2,
        (half[:, :64], half),
    ):
        with pytest.raises(ValueError, match="times"):
            shared_gemm.linear(x, weight)
