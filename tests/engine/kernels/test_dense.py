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
