"""Rotary embedding and KV-cache writes against plain torch, on the GPU."""

from types import SimpleNamespace

import pytest
import torch

from specter_lab.engine import rotary
from tests.engine.kernels.inputs import normal, relative_error

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
POSITIONS = 600


def shape_of(heads, kv_heads, key_dim, value_dim, rotary_dim, latent):
    return SimpleNamespace(heads=heads, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, rotary_dim=rotary_dim,
                           latent=latent, rope_theta=1e4)  # fmt: skip


SHAPES = [
    shape_of(16, 16, 128, 128, 128, 0), shape_of(8, 2, 64, 48, 64, 0), shape_of(3, 1, 24, 24, 24, 0),
    shape_of(16, 16, 192, 128, 64, 512), shape_of(2, 2, 40, 24, 16, 72),
]  # fmt: skip


def rows_of(shape, tokens):
    if not shape.latent:
        width = shape.heads * shape.key_dim + shape.kv_heads * (shape.key_dim + shape.value_dim)
        return normal(tokens, width), None
    entry = normal(tokens, shape.heads * shape.key_dim + shape.latent + shape.rotary_dim)
    return entry, normal(tokens, shape.heads * (shape.key_dim - shape.rotary_dim + shape.value_dim))


def new_cache(shape, device="cpu", lanes=1):
    keys = torch.zeros(lanes, POSITIONS, shape.kv_heads, shape.key_dim, dtype=torch.bfloat16, device=device)
    values = torch.zeros(lanes, POSITIONS, shape.kv_heads, shape.value_dim, dtype=torch.bfloat16, device=device)
    table = rotary.rotary_table(shape, POSITIONS, torch.device("cpu"))
    return keys, values, tuple(part.to(device) for part in table)


def run(shape, entry, expanded, cache, *positions):
    from specter_lab.engine.kernel_ops import KernelOps

    moved = None if expanded is None else expanded.cuda()
    place = torch.tensor(positions, device="cuda")
    return KernelOps(None).rotate_and_store(shape, entry.cuda(), moved, *cache, place)


@pytest.mark.parametrize("position", [0, 5, 567])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_torchs(shape, position, tokens):
    (entry, expanded), there, here = rows_of(shape, tokens), new_cache(shape, "cuda"), new_cache(shape)
    q = run(shape, entry, expanded, there, position)
    expected = rotary.rotate_and_store(shape, entry, expanded, *here, torch.tensor([position]))
    assert q.shape == (tokens, shape.heads, shape.key_dim)
    if tokens:
        for found, wanted in ((q, expected), (there[0], here[0]), (there[1], here[1])):
            assert relative_error(found, wanted) < 1e-3
    for found in there[:2]:
        assert not found[0, :position].any() and not found[0, position + tokens :].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_the_others(shape):
    (entry, expanded), cache = rows_of(shape, 33), new_cache(shape, "cuda")
    together = run(shape, entry, expanded, cache, 100)
    for size in (1, 2, 9, 17):
        alone = new_cache(shape, "cuda")
        for first in range(0, 33, size):
            part = slice(first, first + size)
            q = run(shape, entry[part], None if expanded is None else expanded[part], alone, 100 + first)
            assert torch.equal(q, together[part])
        assert all(torch.equal(a, b) for a, b in zip(alone[:2], cache[:2]))


@pytest.mark.parametrize("each", [1, 9])
@pytest.mark.parametrize("shape", SHAPES)
def test_requests_have_places_of_their_own(shape, each):
    positions = (0, 567, 5)
    entry, expanded = rows_of(shape, len(positions) * each)
    there, here = new_cache(shape, "cuda", 3), new_cache(shape, lanes=3)
    q = run(shape, entry, expanded, there, *positions)
    expected = rotary.rotate_and_store(shape, entry, expanded, *here, torch.tensor(positions))
    for found, wanted in ((q, expected), (there[0], here[0]), (there[1], here[1])):
        assert relative_error(found, wanted) < 1e-3
