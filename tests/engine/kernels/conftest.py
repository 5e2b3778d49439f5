"""What the kernels' tests share: no kernel may rely on what an output held before."""

import pytest
import torch

from tests.engine.kernels import inputs


@pytest.fixture
def poisoned(monkeypatch):
    """Fresh CUDA tensors hold NaN, or a large number, instead of what happens to be there."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))


def poisoning(make):
    def made(*args, **kwargs):
        tensor = make(*args, **kwargs)
        if tensor.is_cuda:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0x3FFFFFFF)
        return tensor

    return made


@pytest.fixture(params=[0, 1, 2, 9, 17, 33])
def tokens(request):
    return request.param


@pytest.fixture(autouse=True)
def seed():
    inputs.reseed()
