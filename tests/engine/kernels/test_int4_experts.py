"""Fused INT4 experts against the reference, on the GPU."""

import pytest
import torch

from specter_lab.engine.kernels import reference
from tests.engine.kernels.inputs import int4_bank, normal, on_gpu, relative_error, routing

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
TOLERANCE = 5e-3  # bfloat16 rounding of the result alone is about 2e-3


def run(x, indices, weights, bank, **options):
    from specter_lab.engine.kernels.int4_experts import expert_ffn

    return expert_ffn(x.cuda(), indices.cuda(), weights.cuda(), on_gpu(bank), **options)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "width"),
    [(60, 4, 256, 32), (16, 2, 384, 64), (64, 6, 64, 96), (8, 1, 640, 128), (5, 3, 1152, 1408), (4, 2, 128, 1280)],
)
def test_it_is_the_reference(experts, top_k, hidden, width, tokens, one_by_one):
    bank, x = int4_bank(experts, hidden, width), normal(tokens, hidden)
    indices, weights = routing(tokens, experts, top_k)
    found = run(x, indices, weights, bank, one_by_one=one_by_one)
    assert found.shape == x.shape and found.dtype == torch.bfloat16
    if tokens:
        assert relative_error(found, reference.int4_expert_ffn(x, indices, weights, bank)) < TOLERANCE


def test_all_tokens_on_one_expert(tokens):
    bank, x = int4_bank(16, 256, 64), normal(tokens, 256)
    indices, weights = torch.full((tokens, 1), 11), torch.rand(tokens, 1)
    found = run(x, indices, weights, bank)
    if tokens:
        assert relative_error(found, reference.int4_expert_ffn(x, indices, weights, bank)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 9])
def test_choices_outside_the_experts_add_nothing(tokens):
    bank, x = int4_bank(16, 256, 64), normal(tokens, 256)
    indices, weights = routing(tokens, 16, 4)
    indices[:, 1], indices[0, 3] = 16, -1
    found = run(x, indices, weights, bank)
    assert relative_error(found, reference.int4_expert_ffn(x, indices, weights, bank)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_graph_follows_its_inputs(tokens):
    from specter_lab.engine.kernels.int4_experts import expert_ffn

    bank = int4_bank(60, 256, 32)
    there = on_gpu(bank)
    x, indices, weights = normal(tokens, 256).cuda(), *(t.cuda() for t in routing(tokens, 60, 4))
    expert_ffn(x, indices, weights, there)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        middle = expert_ffn(x, indices, weights, there)
        out = expert_ffn(middle, indices, weights, there)
    for _ in range(3):
        new_x, (new_indices, new_weights) = normal(tokens, 256), routing(tokens, 60, 4)
        x.copy_(new_x), indices.copy_(new_indices), weights.copy_(new_weights)
        graph.replay()
        expected = reference.int4_expert_ffn(new_x, new_indices, new_weights, bank)
        assert relative_error(middle, expected) < TOLERANCE
        expected = reference.int4_expert_ffn(middle.cpu(), new_indices, new_weights, bank)
        assert relative_error(out, expected) < TOLERANCE


def test_it_is_deterministic():
    bank, x = int4_bank(60, 512, 384), normal(9, 512)
    indices, weights = routing(9, 60, 4)
    first = run(x, indices, weights, bank)
    assert all(torch.equal(run(x, indices, weights, bank), first) for _ in range(10))
