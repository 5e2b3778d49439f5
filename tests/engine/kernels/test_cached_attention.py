"""Cached attention against plain torch, on the GPU: past and source, beams that share caches, nothing read behind the end."""

import pytest
import torch

from specter_lab.engine import switch_ops
from tests.engine.kernels.inputs import normal, relative_error

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SIZES = [(1, 1, 1, 5, 24), (3, 1, 2, 40, 64), (96, 1, 16, 32, 64), (2, 3, 2, 70, 16), (1, 2, 3, 33, 128)]


def on_gpu(*tensors):
    return [tensor.cuda() for tensor in tensors]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("batch", "beam", "heads", "size", "dim"), SIZES)
def test_a_row_finds_in_its_past_what_torch_finds(batch, beam, heads, size, dim, dtype):
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    bias = normal(heads, size, size, dtype=dtype).masked_fill(later, torch.finfo(dtype).min)
    for last in (0, 1, size - 1):
        qkv, cache = (
            normal(batch * beam, 3 * heads * dim, scale=0.5, dtype=dtype),
            normal(2, batch, heads, beam, size, dim, dtype=dtype),
        )
        owner = torch.randint(0, beam, (batch, beam, size))
        owner[:, :, last] = torch.arange(beam)
        position = torch.tensor([last])
        there = cache.cuda()
        there[..., last:, :] = float("nan")  # written or not read
        found = switch_ops.self_attend(qkv.cuda(), there, *on_gpu(owner, bias, position))
        wide = cache.float()
        expected = switch_ops.self_attend(qkv.float(), wide, owner, bias.float(), position)
        assert found.dtype == dtype and relative_error(found, expected) < TOLERANCE[dtype]
        assert torch.equal(there[..., : last + 1, :].cpu().float(), wide[..., : last + 1, :])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("batch", "beam", "heads", "size", "dim"), SIZES)
def test_a_row_finds_in_its_source_what_torch_finds(batch, beam, heads, size, dim, dtype):
    q, cache = (
        normal(batch * beam, heads * dim, scale=0.5, dtype=dtype),
        normal(2, batch, heads, size, dim, dtype=dtype),
    )
    mask = torch.zeros(batch, 1, 1, size, dtype=dtype)
    mask[0, ..., size // 2 :] = torch.finfo(dtype).min
    found = switch_ops.cross_attend(*on_gpu(q, cache, mask))
    expected = switch_ops.cross_attend(q.float(), cache.float(), mask.float())
    assert found.dtype == dtype and relative_error(found, expected) < TOLERANCE[dtype]


def test_a_row_does_not_depend_on_the_others():
    cache, mask, q = (
        normal(2, 9, 4, 40, 64).cuda(),
        torch.zeros(9, 1, 1, 40, dtype=torch.bfloat16).cuda(),
        normal(9, 256).cuda(),
    )
    together = switch_ops.cross_attend(q, cache, mask)
    for row in range(9):
        alone = switch_ops.cross_attend(q[row : row + 1], cache[:, row : row + 1].contiguous(), mask[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_rows_that_do_not_fit_are_refused():
    from specter_lab.engine.kernels import cached_attention

    cache, mask = torch.zeros(2, 2, 4, 8, 16, device="cuda"), torch.zeros(2, 1, 1, 8, device="cuda")
    with pytest.raises(ValueError, match="rows"):
        cached_attention.cross_attend(torch.zeros(2, 65, device="cuda"), *cache, mask)
    with pytest.raises(ValueError, match="contiguous"):
        cached_attention.cross_attend(torch.zeros(64, 2, device="cuda").t(), *cache, mask)
