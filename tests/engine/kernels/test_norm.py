"""Norms against torch in double precision; a row does not depend on the rows beside it."""

import pytest
import torch

from specter_lab.engine.decoder import Norm
from specter_lab.engine.ops import TorchOps
from tests.engine.kernels.inputs import normal, relative_error

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


@pytest.mark.parametrize("width", [64, 256, 2048, 4096, 100])
@pytest.mark.parametrize("tokens", [0, 1, 9, 33])
@pytest.mark.parametrize("centred", [False, True])
def test_norm(width, tokens, centred):
    from specter_lab.engine.kernels.norm import norm

    x, weight, bias = normal(tokens, width), normal(width), normal(width)
    found = norm(x.cuda(), weight.cuda(), bias.cuda() if centred else None, 1e-6)
    wide = x.double()
    if centred:
        expected = torch.nn.functional.layer_norm(wide, (width,), weight.double(), bias.double(), 1e-6)
    else:
        expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    assert found.shape == x.shape
    assert not tokens or relative_error(found, expected) < 6e-3
    for row in range(tokens):
        assert torch.equal(
            norm(x[row : row + 1].cuda(), weight.cuda(), bias.cuda() if centred else None, 1e-6)[0], found[row]
        )


@pytest.mark.parametrize("width", [64, 2048, 4096, 100])
@pytest.mark.parametrize("terms", ["y", "shared", "gated"])
@pytest.mark.parametrize("centred", [False, True])
def test_add_norm(width, tokens, terms, centred):
    from specter_lab.engine.kernels.norm import add_norm

    x, y, shared = (normal(tokens, width) for _ in range(3))
    gate = normal(tokens, 7, dtype=torch.float32)[:, 6 : 7 if terms == "gated" else 6]
    weight, bias = normal(width), normal(width) if centred else None
    more = () if terms == "y" else (shared, gate)

    def run(*rows):
        return add_norm(*(t.cuda() for t in rows[:2]), weight.cuda(), bias.cuda() if centred else None, 1e-6,
                        *(t.cuda() for t in rows[2:]))  # fmt: skip

    found = run(x, y, *more)
    wide = [t.double() for t in (x, y, *more)]
    norm = Norm(weight.double(), bias.double() if centred else None)
    expected = TorchOps().add_norm(*wide[:2], norm, 1e-6, *wide[2:])
    for one, other in zip(found, expected):
        assert one.shape == x.shape and one.dtype == x.dtype
        assert not tokens or relative_error(one, other) < 8e-3
    for row in range(tokens):
        alone = run(*(t[row : row + 1] for t in (x, y, *more)))
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, found))
