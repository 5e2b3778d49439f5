"""Router kernels against plain torch, on the GPU."""

from types import SimpleNamespace

import pytest
import torch

from specter_lab.engine.router import route
from tests.engine.kernels.inputs import normal

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


def run(shape, logits):
    from specter_lab.engine.kernel_ops import KernelOps

    indices = torch.empty(len(logits), shape.top_k, dtype=torch.int64, device="cuda")
    weights = torch.empty(len(logits), shape.top_k, device="cuda")
    KernelOps(None).route(shape, logits.cuda(), indices, weights)
    return indices.cpu(), weights.cpu()


def shape_of(top_k, model_type="qwen2_moe", normalized=False, scale=1.0):
    return SimpleNamespace(
        model_type=model_type, top_k=top_k, normalized=normalized, router_scale=scale, router_jitter=0.01
    )


SHAPES = [
    (60, shape_of(4)), (64, shape_of(6, scale=1.5)), (128, shape_of(8, normalized=True)), (7, shape_of(3)),
    (1, shape_of(1)), (16, shape_of(2, "phimoe")), (3, shape_of(2, "phimoe")), (128, shape_of(2, "phimoe")),
]  # fmt: skip


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("experts", "shape"), SHAPES)
def test_it_is_torchs(experts, shape, tokens, coarse):
    """Coarse logits have many ties: the first of equals wins."""
    logits = normal(tokens, experts + 3, dtype=torch.float32, scale=0.3 if coarse else 2.0)
    logits = (logits * 4).round() / 4 if coarse else logits
    logits = logits[:, :experts]
    indices, weights = run(shape, logits)
    expected = route(shape, logits)
    assert torch.equal(indices, expected[0])
    torch.testing.assert_close(weights, expected[1], rtol=1e-5, atol=1e-7)


def test_close_experts_share_the_sparsemixer():
    logits = torch.tensor([[1.0, 1.001, 0.5, 1.0005], [-1.0, -1.001, -2.0, -1.3], [0.0, 0.0, 0.0, 0.0]])
    indices, weights = run(shape_of(2, "phimoe"), logits)
    expected = route(shape_of(2, "phimoe"), logits)
    assert torch.equal(indices, expected[0]) and (weights < 1).any()
    torch.testing.assert_close(weights, expected[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("experts", "shape"), SHAPES)
def test_a_row_does_not_depend_on_the_others(experts, shape):
    logits = normal(33, experts, dtype=torch.float32)
    together = run(shape, logits)
    for size in (1, 2, 9, 17):
        for first in range(0, 33, size):
            alone = run(shape, logits[first : first + size])
            assert all(torch.equal(a, b[first : first + size]) for a, b in zip(alone, together))


def test_too_many_experts_are_refused():
    with pytest.raises(ValueError, match="129 experts"):
        run(shape_of(2), normal(2, 129, dtype=torch.float32))
