"""The GPTQ files of this project mean the same to gptqmodel: asked in a process of its own, as everything of it is."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from specter_lab.compress.checkpoint import load_quantized
from specter_lab.compress.gptq_checkpoint import write_gptq
from specter_lab.compress.rtn import quantize_bank
from specter_lab.models.experts import read_banks

DEQUANTIZE = """
import os, sys
os.environ.update(GPTQMODEL_CPU_WORKERS="2", CUDA_VISIBLE_DEVICES="", TORCHDYNAMO_DISABLE="1")
import torch
from gptqmodel import BACKEND, GPTQModel
from safetensors.torch import save_file
for folder in sys.argv[1:]:
    model = GPTQModel.load(folder, device="cpu", backend=BACKEND.AUTO, dtype=torch.float16).model
    packed = {name: module for name, module in model.named_modules() if hasattr(module, "qweight")}
    weights = {name: module.dequantize_weight().t().contiguous() for name, module in packed.items()}
    save_file(weights, folder + "/dequantized.st")
"""


@pytest.mark.skipif(find_spec("gptqmodel") is None, reason="gptqmodel is not installed")
def test_gptqmodel_gets_the_same_weights(sources, tmp_path):
    """Three widths, the straddling one included, and all architectures: equal to the last bit of FP16."""
    cases = [("qwen-nano", 3), ("phi-nano", 4), ("deepseek-nano", 8)]
    folders = [tmp_path / f"{name}-{bits}" for name, bits in cases]
    for (name, bits), folder in zip(cases, folders):
        folder.mkdir()
        banks = [quantize_bank(bank, bits) for bank in read_banks(sources[name].model)]
        write_gptq(sources[name], banks, bits, 128, "test", folder)
    subprocess.run([sys.executable, "-c", DEQUANTIZE, *map(str, folders)], check=True, capture_output=True)
    for (name, _), folder in zip(cases, folders):
        theirs = load_file(folder / "dequantized.st")
        banks = load_quantized(folder, sources[name]).banks
        assert len(theirs) == 3 * len(banks) * sources[name].num_experts
        for module, weights in theirs.items():
            parts = module.split(".")
            bank = next(bank for bank in banks if bank.layer == int(parts[parts.index("layers") + 1]))
            projection = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}[parts[-1]]
            assert torch.equal(getattr(bank, projection)[int(parts[-2])].half(), weights), module
