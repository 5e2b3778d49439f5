"""Norms against torch in double precision; a row does not depend on the rows beside it."""

import pytest
import torch

from tests.engine.kernels.inputs import normal, relative_error

pytestmark = pytest.mark.gpu


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
