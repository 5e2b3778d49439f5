"""BF16 experts through the address table against the reference, on the GPU."""

import pytest
import torch

from specter_lab.engine.kernels import reference
from tests.engine.kernels.inputs import blocks, normal, pairs_of, relative_error, routing

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
TOLERANCE = 5e-3  # bfloat16 rounding of the result alone is about 2e-3


def table(expert_blocks):
    """Addresses [E] of the rows of a device or pinned tensor."""
    step = expert_blocks.stride(0) * expert_blocks.element_size()
    return [expert_blocks.data_ptr() + step * e for e in range(expert_blocks.shape[0])]


def on_device(addresses):
    return torch.tensor(addresses, dtype=torch.int64, device="cuda")


def span(tensor):
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def run(x, indices, weights, addresses, width, **options):
    from specter_lab.engine.kernels.grouped_gemm import expert_ffn

    return expert_ffn(x.cuda(), indices.cuda(), weights.cuda(), addresses, width, **options)


@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "width"),
    [(60, 4, 256, 32), (16, 2, 200, 64), (64, 6, 136, 96), (8, 1, 640, 72), (5, 3, 1152, 1408)],
)
def test_it_is_the_reference(experts, top_k, hidden, width, tokens):
    host, x = blocks(experts, hidden, width), normal(tokens, hidden)
    indices, weights = routing(tokens, experts, top_k)
    slab = host.cuda()
    found = run(x, indices, weights, on_device(table(slab)), width)
    assert found.shape == x.shape and found.dtype == torch.bfloat16
    if tokens:
        expected = reference.expert_ffn(x, indices, weights, pairs_of(host, hidden, width))
        assert relative_error(found, expected) < TOLERANCE


def test_all_tokens_on_one_expert(tokens):
    host, x = blocks(16, 256, 64), normal(tokens, 256)
    indices, weights = torch.full((tokens, 1), 11), torch.rand(tokens, 1)
    slab = host.cuda()
    found = run(x, indices, weights, on_device(table(slab)), 64)
    if tokens:
        expected = reference.expert_ffn(x, indices, weights, pairs_of(host, 256, 64))
        assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 9])
def test_choices_outside_the_experts_add_nothing(tokens):
    host, x = blocks(16, 256, 64), normal(tokens, 256)
    indices, weights = routing(tokens, 16, 4)
    indices[:, 1], indices[0, 3] = 16, -1
    slab = host.cuda()
    found = run(x, indices, weights, on_device(table(slab)), 64)
    expected = reference.expert_ffn(x, indices, weights, pairs_of(host, 256, 64))
    assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 9, 33])
def test_experts_in_pinned_memory_give_the_same_bits(tokens):
    """An expert that is not resident is read over PCIe; where it lies, and which starts first, changes nothing."""
    host, x = blocks(60, 256, 96).pin_memory(), normal(tokens, 256)
    indices, weights = routing(tokens, 60, 4)
    slab = host.cuda()
    resident = run(x, indices, weights, on_device(table(slab)), 96)
    mixed = [near if e % 2 else far for e, (near, far) in enumerate(zip(table(slab), table(host)))]
    for addresses in (table(host), mixed):
        for order in (None, span(slab)):
            assert torch.equal(run(x, indices, weights, on_device(addresses), 96, slab=order), resident)


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_graph_follows_the_table(tokens):
    from specter_lab.engine.kernels.grouped_gemm import expert_ffn

    host = blocks(16, 256, 64).pin_memory()
    slab = torch.full((4, host.shape[1]), float("nan"), dtype=torch.bfloat16, device="cuda")  # slots for 4 of 16
    x, indices, weights = normal(tokens, 256).cuda(), *(t.cuda() for t in routing(tokens, 16, 4))
    addresses = on_device(table(host))
    expert_ffn(x, indices, weights, addresses, 64, slab=span(slab))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = expert_ffn(x, indices, weights, addresses, 64, slab=span(slab))
    for resident in ([], [3, 7, 8, 15], [0, 7, 1, 2]):
        new_x, (new_indices, new_weights) = normal(tokens, 256), routing(tokens, 16, 4)
        x.copy_(new_x), indices.copy_(new_indices), weights.copy_(new_weights)
        entries = table(host)
        for slot, expert in enumerate(resident):
            slab[slot].copy_(host[expert])
            entries[expert] = table(slab)[slot]
        addresses.copy_(on_device(entries))
        out.fill_(float("nan"))
        graph.replay()
        expected = reference.expert_ffn(new_x, new_indices, new_weights, pairs_of(host, 256, 64))
        assert relative_error(out, expected) < TOLERANCE


@pytest.mark.parametrize(("hidden", "width", "top_k"), [(2048, 1408, 4), (200, 96, 6)])
def test_a_row_does_not_depend_on_the_others(hidden, width, top_k):
    slab = (0.05 * torch.randn(16, 3 * hidden * width, device="cuda")).bfloat16()
    x, (indices, weights) = normal(33, hidden), routing(33, 16, top_k)
    addresses = on_device(table(slab))
    together = run(x, indices, weights, addresses, width)
    assert not torch.equal(together[0], together[1])
    for size in (1, 2, 9, 17):
        for first in range(0, 33, size):
            part = slice(first, first + size)
            alone = run(x[part].clone(), indices[part].clone(), weights[part].clone(), addresses, width)
            assert torch.equal(alone, together[part]), (size, first)
    shuffled = torch.randperm(33)
    again = run(x[shuffled], indices[shuffled], weights[shuffled], addresses, width)
    assert torch.equal(again, together[shuffled.cuda()])


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(2, 2, 3), (9, 4, 60), (33, 6, 64), (64, 8, 128)])
def test_routes_sort_every_pair_once(tokens, top_k, experts):
    from specter_lab.engine.kernels.routes import route

    indices, _ = routing(tokens, experts, top_k)
    far = torch.arange(experts) % 3 == 0
    addresses = on_device([5000 if f else 1000 for f in far])
    for slab in (None, (0, 2000)):
        routes = route(indices.cuda(), experts, addresses, slab)
        count, start, order = (t.cpu() for t in (routes.count, routes.start, routes.order))
        used = int((count > 0).sum())
        assert (count[:used] > 0).all() and not count[used:].any() and count.sum() == indices.numel()
        assert sorted(order.tolist()) == list(range(indices.numel()))
        named = routes.expert[:used].cpu().tolist()
        assert sorted(named) == indices.unique().tolist()
        if slab:
            assert far[named].int().diff().le(0).all()  # far ones first
        for slot in range(used):
            mine = order[start[slot] : start[slot] + count[slot]]
            assert mine.tolist() == (indices.flatten() == named[slot]).nonzero().flatten().tolist()


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="65 tokens"):
        run(normal(65, 64), *routing(65, 4, 2), on_device([0] * 4), 32)
