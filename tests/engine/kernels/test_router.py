"""Router kernels against plain torch, on the GPU."""

from types import SimpleNamespace

import pytest
import torch

from specter_lab.engine import switch_ops
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("count", "experts", "hidden"), [(0, 4, 32), (1, 1, 8), (7, 6, 100), (96, 32, 1024), (530, 128, 640)]
)
def test_the_best_expert_of_hidden_states(count, experts, hidden, dtype):
    router, x = normal(experts, hidden, scale=hidden**-0.5, dtype=torch.float32), normal(count, hidden, dtype=dtype)
    logits = x.double() @ router.double().t()
    best = logits.max(-1, keepdim=True)
    clear = (logits > best.values - 1e-5).sum(-1) == 1  # rounding decides the others
    for finished in (None, torch.rand(count) < 0.3):
        expert, share = switch_ops.route(router.cuda(), x.cuda(), None if finished is None else finished.cuda())
        expected = best.indices[:, 0] if finished is None else best.indices[:, 0].masked_fill(finished, experts)
        assert torch.equal(expert.cpu()[clear], expected[clear]) and clear.sum() >= 0.9 * count
        torch.testing.assert_close(share.cpu().double(), logits.softmax(-1).amax(-1), rtol=1e-5, atol=1e-6)


def test_the_first_of_equal_experts_wins():
    router = torch.ones(5, 16, device="cuda")
    router[0] = 0.0
    expert, share = switch_ops.route(router, torch.ones(3, 16, device="cuda"), None)
    assert expert.tolist() == [1, 1, 1]
    torch.testing.assert_close(share.cpu(), torch.full((3,), 0.25), rtol=1e-5, atol=1e-6)
