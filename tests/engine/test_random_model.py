"""Random models have the sizes of trained ones."""

import pytest
import torch

from specter_lab.engine.bench import tensors_of
from specter_lab.engine.load import checkpoint_tensors, read_decoder
from specter_lab.engine.random_model import random_decoder
from specter_lab.models.load import read_config, resolve


@pytest.mark.parametrize("model", ["qwen-nano", "phi-nano", "deepseek-nano"])
def test_shapes_are_those_of_a_checkpoint(model):
    folder = resolve(model)
    config = read_config(folder)
    trained = read_decoder(config, checkpoint_tensors(folder), lambda *_: None, device="cpu", dtype=torch.float32)
    drawn = random_decoder(config, torch.float32, torch.Generator())
    for part in ("embedding", "layers", "norm", "head"):
        shapes = [[tuple(t.shape) for t in tensors_of(getattr(decoder, part))] for decoder in (trained, drawn)]
        assert shapes[0] == shapes[1]
    assert [layer.mlp.experts for layer in trained.layers] == [layer.mlp.experts for layer in drawn.layers]
    assert [layer.mlp.width for layer in trained.layers] == [layer.mlp.width for layer in drawn.layers]
