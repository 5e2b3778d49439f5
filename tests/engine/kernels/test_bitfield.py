"""Recovery by the Triton kernel, all 65,536 patterns; on a GPU, and in Triton's interpreter in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

from specter_lab.compress.bitfield import split
from specter_lab.paths import ROOT

pytest.importorskip("triton")

ALL_PATTERNS = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
CHECK = """
import torch
from specter_lab.compress.bitfield import split
from specter_lab.engine.kernels.bitfield import recover
weights = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
for n in (0, 1, 4095, 4097, 2**16):
    fields = [torch.from_numpy(part) for part in split(weights[:n])]
    assert torch.equal(recover(*fields).view(torch.int16), weights[:n].view(torch.int16)), n
print("equal")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("n", [0, 1, 4095, 4097, 2**16])
def test_every_pattern_on_a_gpu(n):
    from specter_lab.engine.kernels.bitfield import recover

    fields = [torch.from_numpy(part).cuda() for part in split(ALL_PATTERNS[:n])]
    assert torch.equal(recover(*fields).cpu().view(torch.int16), ALL_PATTERNS[:n].view(torch.int16))


def test_every_pattern_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


def test_other_layouts_are_refused():
    from specter_lab.engine.kernels.bitfield import recover

    bytes_ = torch.zeros(8, dtype=torch.uint8)
    for wrong in (bytes_[::2], bytes_.int(), bytes_[:4]):
        with pytest.raises(ValueError, match="uint8"):
            recover(bytes_, wrong)
