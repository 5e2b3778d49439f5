"""Row-invariant attention over a static cache against the reference, on the GPU."""

import pytest
import torch

from specter_lab.engine.kernels import reference
from tests.engine.kernels.inputs import normal, relative_error

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
TOLERANCE = 6e-3  # shares are rounded to bfloat16 before they meet the values, and so is the result


@pytest.fixture
def arrivals():
    from specter_lab.engine.kernels.dense import new_arrivals

    counters = new_arrivals("cuda")
    yield counters
    assert not counters.any()  # as every call must leave them


def run(q, k, v, position, scale, arrivals):
    from specter_lab.engine.kernels.attention import attend

    return attend(q.cuda(), k.cuda()[None], v.cuda()[None], torch.tensor([position], device="cuda"), scale, arrivals)


def cache(size, heads, dim, used, heads_first=False):
    """[S, heads, dim] whose positions from `used` on were never written."""
    tensor = normal(heads, size, dim).transpose(0, 1) if heads_first else normal(size, heads, dim)
    tensor[used:] = float("nan")
    return tensor


@pytest.mark.parametrize("position", [0, 1, 63, 250, 700])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dim_v"), [(8, 8, 64, 64), (8, 2, 128, 128), (6, 6, 192, 128), (4, 1, 24, 16)]
)
def test_it_is_the_reference(heads, kv_heads, dim, dim_v, position, tokens, arrivals):
    used = position + tokens
    q, k = normal(tokens, heads, dim), cache(1000, kv_heads, dim, used, heads_first=position % 2 == 1)
    v = cache(1000, kv_heads, dim_v, used)
    found = run(q, k, v, position, dim**-0.5, arrivals)
    assert found.shape == (tokens, heads, dim_v)
    if tokens:
        assert relative_error(found, reference.attend(q, k, v, position, dim**-0.5)) < TOLERANCE


def test_it_is_causal_and_sharp(arrivals):
    """With a large scale every token sees one key: its own, made the best match."""
    k, v = normal(300, 2, 64), normal(300, 2, 64)
    q = k[250:259].clone()
    found = run(q, k, v, 250, 100.0, arrivals)
    assert torch.equal(found.cpu(), v[250:259])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 16, 128), (32, 8, 128), (16, 16, 192)])
@pytest.mark.parametrize("position", [0, 17, 240, 505])
def test_a_row_does_not_depend_on_the_others(heads, kv_heads, dim, position, arrivals):
    used = position + 33
    q, k, v = normal(33, heads, dim), cache(1024, kv_heads, dim, used), cache(1024, kv_heads, 128, used)
    together = run(q, k, v, position, 0.1, arrivals)
    for size in (1, 2, 9, 17):
        for first in range(0, 33, size):
            alone = run(q[first : first + size].clone(), k, v, position + first, 0.1, arrivals)
            assert torch.equal(alone, together[first : first + size]), (size, first)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 16, 128), (32, 8, 128), (16, 16, 192)])
@pytest.mark.parametrize("each", [1, 9])
def test_requests_do_not_see_each_other(heads, kv_heads, dim, each, arrivals):
    from specter_lab.engine.kernels.attention import attend

    positions = (0, 700, 63, 255, 256)
    q = normal(len(positions) * each, heads, dim)
    k, v = (torch.stack([cache(1000, kv_heads, d, p + each) for p in positions]) for d in (dim, 128))
    place = torch.tensor(positions, device="cuda")
    together = attend(q.cuda(), k.cuda(), v.cuda(), place, 0.1, arrivals)
    for lane, position in enumerate(positions):
        mine = slice(lane * each, (lane + 1) * each)
        assert torch.equal(run(q[mine].clone(), k[lane], v[lane], position, 0.1, arrivals), together[mine])


def test_a_graph_follows_the_position(arrivals):
    from specter_lab.engine.kernels.attention import attend

    q, k, v = (t.cuda() for t in (normal(9, 8, 64), normal(1, 1024, 8, 64), normal(1, 1024, 8, 64)))
    position = torch.tensor([5], device="cuda")
    attend(q, k, v, position, 0.125, arrivals)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, k, v, position, 0.125, arrivals)
    for place in (0, 600, 250, 247, 1015):
        position.fill_(place)
        graph.replay()
        expected = reference.attend(q.cpu(), k[0].cpu(), v[0].cpu(), place, 0.125)
        assert relative_error(out, expected) < TOLERANCE
