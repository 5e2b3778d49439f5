"""The bench of a step's operations in small, on the CPU: every operation runs, and its bytes are its operands'."""

import torch

from specter_lab.engine.bench_switch_ops import operations
from specter_lab.models.switch import SwitchGeometry

SMALL = SwitchGeometry(hidden=128, ffn=128, encoder_layers=2, decoder_layers=2, experts=8, vocab=300)


def test_every_operation_runs():
    found = {what: (calls, read) for what, calls, read in operations(3, 2, 5, SMALL, device="cpu", dtype=torch.float32)}
    shapes = {what: [call() for call in calls][-1] for what, (calls, _) in found.items()}
    assert shapes["self-attention"].shape == shapes["cross-attention"].shape == shapes["norm"].shape == (6, 128)
    assert [tuple(part.shape) for part in shapes["likeliest token"]] == [(6,)] * 3
    assert shapes["router"][0].shape == (6,) and shapes["sorting"].tokens == 6
    assert found["cross-attention"][1] == 2 * 3 * 5 * 128 * 4 and found["self-attention"][1] == 2 * 6 * 5 * 128 * 4
