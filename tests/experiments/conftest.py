"""The toy experiment, registered for one test."""

import pytest

from specter_lab import paths
from tests.experiments import toy


@pytest.fixture
def log(out, tmp_path, monkeypatch):
    """Where the toy's rows log that they started; the toy is registered."""
    monkeypatch.setattr(paths, "CLAIMS", paths.CLAIMS)
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", str(paths.ROOT))
    toy.register(tmp_path)
    yield tmp_path / "log"
    del toy.registry.EXPERIMENTS[toy.TOY.id], toy.registry.EXPERIMENTS[toy.AGAIN.id]
