"""The kernel restores what the reference restores: on a GPU, and in Triton's interpreter in a process of its own."""

import os
import subprocess
import sys

import pytest

from specter_lab.paths import ROOT

pytest.importorskip("triton")

CHECK = """
import sys, torch
from dataclasses import replace
from specter_lab.compress.grid import Codes, round_to_nearest
from specter_lab.compress.int4 import pack
from specter_lab.compress.residual import encode
from specter_lab.engine.kernels.residual import restore

def check(weights, codes, device):
    residual = encode(weights, codes)
    moved = replace(residual, **{name: getattr(residual, name).to(device) for name in ("low", "stream", "starts", "places", "patterns")})
    packed, scales = pack(codes.codes).flatten(0, -2).to(device), codes.scales.flatten(0, -2).to(device)
    assert torch.equal(restore(moved, packed, scales).cpu().view(torch.int16), weights.flatten(0, -2).view(torch.int16))

device = sys.argv[1]
patterns = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).view(1, 512, 128)
for q in (-8, -2, -1, 0, 1, 7):
    codes = Codes(torch.full((1, 512, 128), q, dtype=torch.int8), torch.full((1, 512, 1), 0.01).half(), 4)
    check(patterns[:, ::8] if device == "cpu" else patterns, Codes(codes.codes[:, ::8], codes.scales[:, ::8], 4) if device == "cpu" else codes, device)
for shape in ((1, 1, 2), (2, 3, 32), (1, 5, 384), (1, 2, 1408)):
    weights = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    check(weights, round_to_nearest(weights, 4), device)
print("equal")
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_pattern_and_odd_shapes(device):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    done = subprocess.run([sys.executable, "-c", CHECK, device], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
