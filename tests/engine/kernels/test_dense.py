"""Row-invariant dense layer against the reference, on the GPU."""

import pytest
import torch

from specter_lab.engine.kernels import reference
from tests.engine.kernels.inputs import normal, relative_error

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
TOLERANCE = 5e-3  # bfloat16 rounding of the result alone is about 2e-3


@pytest.fixture
def arrivals():
    from specter_lab.engine.kernels.dense import new_arrivals

    counters = new_arrivals("cuda")
    yield counters
    assert not counters.any()  # as every call must leave them


def run(*args, **options):
    from specter_lab.engine.kernels.dense import linear

    return linear(*args, **options)


@pytest.mark.parametrize(("bias", "out_dtype"), [(False, torch.bfloat16), (True, torch.float32)])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (200, 136), (60, 2048), (1000, 2816), (33, 72)])
def test_it_is_the_reference(outputs, inputs, tokens, bias, out_dtype, arrivals):
    x, weight = normal(tokens, inputs), normal(outputs, inputs, scale=0.05)
    shift = normal(outputs) if bias else None
    moved = shift.cuda() if bias else None
    found = run(x.cuda(), weight.cuda(), arrivals, moved, out_dtype=out_dtype)
    expected = reference.linear(x, weight, shift, out_dtype=torch.float32)
    assert found.shape == expected.shape and found.dtype == out_dtype
    if tokens:
        assert relative_error(found, expected) < (TOLERANCE if out_dtype == torch.bfloat16 else 1e-5)


def test_rows_may_be_views(arrivals):
    whole, weights = normal(9, 512).cuda(), normal(128, 512).cuda()
    x, weight = whole[:, 64:320], weights[:, 128:384]
    assert torch.equal(run(x, weight, arrivals), run(x.contiguous(), weight.contiguous(), arrivals))


@pytest.mark.parametrize(("outputs", "inputs"), [(2048, 2048), (6144, 2048), (2048, 5632), (200, 136), (60, 2048)])
def test_a_row_does_not_depend_on_the_others(outputs, inputs, arrivals):
    x, weight = normal(150, inputs).cuda(), normal(outputs, inputs).cuda()
    together = run(x, weight, arrivals)
    for size in (1, 2, 9, 17, 33, 64):
        for first in range(0, 150, 7 * size):
            part = slice(first, first + size)
            assert torch.equal(run(x[part], weight, arrivals), together[part]), (size, first)


def test_a_graph_follows_its_inputs_and_repeats(arrivals):
    x, weight = normal(9, 2048).cuda(), normal(2048, 2048, scale=0.02).cuda()
    run(x, weight, arrivals)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(run(x, weight, arrivals), weight, arrivals)
    for _ in range(20):
        x.copy_(normal(9, 2048))
        graph.replay()
        assert torch.equal(out, run(run(x, weight, arrivals), weight, arrivals))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("width", "others", "inputs"), [(96, 61, 64), (100, 0, 136), (0, 16, 2048), (5, 128, 72), (352, 64, 512)]
)
def test_gated_is_the_reference(width, others, inputs, tokens, bias, arrivals):
    from specter_lab.engine.kernels.dense import gated

    x, weight = normal(tokens, inputs), normal(2 * width + others, inputs, scale=0.05)
    shift = normal(2 * width + others) if bias else None
    act, rest = gated(x.cuda(), weight.cuda(), arrivals, width, shift.cuda() if bias else None)
    expected = reference.gated(x, weight, width, shift)
    assert (act.shape, rest.shape) == tuple(part.shape for part in expected)
    assert (act.dtype, rest.dtype) == (torch.bfloat16, torch.float32)
    if tokens:
        assert not width or relative_error(act, expected[0]) < TOLERANCE
        assert not others or relative_error(rest, expected[1]) < 1e-5


@pytest.mark.parametrize(("width", "others", "inputs"), [(5632, 61, 2048), (352, 64, 512), (0, 16, 4096)])
def test_a_gated_row_does_not_depend_on_the_others(width, others, inputs, arrivals):
    from specter_lab.engine.kernels.dense import gated

    x, weight = normal(33, inputs).cuda(), normal(2 * width + others, inputs, scale=0.05).cuda()
    together = gated(x, weight, arrivals, width)
    for size in (1, 2, 9, 17):
        for first in range(0, 33, size):
            part = slice(first, first + size)
            alone = gated(x[part], weight, arrivals, width)
            assert all(torch.equal(a, b[part]) for a, b in zip(alone, together)), (size, first)
