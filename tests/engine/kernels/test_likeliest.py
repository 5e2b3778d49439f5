"""The choice of a token against plain torch, on the GPU."""

import pytest
import torch

from specter_lab.engine import switch_ops
from tests.engine.kernels.inputs import normal

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(0, 7), (1, 1), (1, 32128), (96, 32128), (5, 8191), (3, 8193), (2, 500)])
def test_it_is_torchs(rows, vocab, dtype):
    logits = normal(rows, vocab, scale=3.0, dtype=dtype)
    token, top, log_sum = (part.cpu() for part in switch_ops.likeliest(logits.cuda()))
    expected = switch_ops.likeliest(logits)
    assert torch.equal(top, expected[1]) and token.dtype == torch.int64
    torch.testing.assert_close(log_sum, expected[2], rtol=1e-5, atol=1e-5)
    assert token.tolist() == [row.tolist().index(max(row.tolist())) for row in logits]  # the first of equals


def test_tokens_that_cannot_be_are_not_chosen():
    logits = torch.full((2, 9000), float("-inf"), device="cuda")
    logits[0, 8500], logits[1, 3], logits[1, 8000] = -4.0, 1.0, 1.0
    token, top, log_sum = switch_ops.likeliest(logits)
    assert token.tolist() == [8500, 3] and top.tolist() == [-4.0, 1.0]
    torch.testing.assert_close(log_sum.cpu(), torch.tensor([-4.0, 1.6931472]))
