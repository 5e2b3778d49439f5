"""Fixtures for all tests: an output folder of their own, and no GPU tests where there is no GPU."""

import os

import pytest

from specter_lab import paths

if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):  # workers share the cores; torch is not imported yet
        os.environ.setdefault(name, "1")


@pytest.fixture
def out(tmp_path, monkeypatch):
    """Everything written goes under a temporary folder, in this process and in those it starts."""
    monkeypatch.setenv("SPECTER_LAB_OUT", str(tmp_path / "out"))
    monkeypatch.setattr(paths, "OUT", tmp_path / "out")
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "out" / "results")
    monkeypatch.setattr(paths, "CACHE", tmp_path / "out" / "cache")
    monkeypatch.setattr(paths, "RECORDED", tmp_path / "recorded")
    return tmp_path / "out"


def pytest_collection_modifyitems(items):
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_tests:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
