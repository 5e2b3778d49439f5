"""Random inputs for the kernels' tests."""

import random
from types import SimpleNamespace

import torch

_generator = torch.Generator()


def reseed():
    _generator.manual_seed(random.SystemRandom().getrandbits(31))  # fresh inputs in every run
    print(f"inputs from seed {_generator.initial_seed()}")  # shown when a test fails


def normal(*shape, scale=1.0, dtype=torch.bfloat16):
    return (scale * torch.randn(*shape, generator=_generator)).to(dtype)


def routing(tokens, experts, top_k):
    indices = [torch.randperm(experts, generator=_generator)[:top_k] for _ in range(tokens)]
    shape = (tokens, top_k)
    return (torch.stack(indices) if tokens else torch.empty(shape, dtype=torch.int64)), torch.rand(
        shape, generator=_generator
    )


def int4_projection(experts, outputs, inputs):
    """Random codes and scales in the INT4 layout."""
    packed = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8, generator=_generator)
    scales = 0.01 + 0.02 * torch.rand(experts, outputs, max(1, inputs // 128), generator=_generator)
    return SimpleNamespace(packed=packed, scales=scales.half())


def int4_bank(experts, hidden, width):
    gate, up = int4_projection(experts, width, hidden), int4_projection(experts, width, hidden)
    return SimpleNamespace(layer=0, gate=gate, up=up, down=int4_projection(experts, hidden, width))


def on_gpu(bank):
    move = {
        name: SimpleNamespace(packed=part.packed.cuda(), scales=part.scales.cuda())
        for name, part in (("gate", bank.gate), ("up", bank.up), ("down", bank.down))
    }
    return SimpleNamespace(layer=bank.layer, **move)


def blocks(experts, hidden, width):
    """[E, 3 I H]: gate and up [2I, H], then down [H, I], one row per expert."""
    return normal(experts, 3 * width * hidden, scale=0.05)


def pairs_of(expert_blocks, hidden, width):
    """The blocks as (gate and up, down), as the reference takes them."""
    cut = 2 * width * hidden
    return [(block[:cut].view(2 * width, hidden), block[cut:].view(hidden, width)) for block in expert_blocks]


def relative_error(found, expected):
    """||found - expected|| / ||expected||; NaN never passes a comparison."""
    expected = expected.double()
    return ((found.cpu().double() - expected).norm() / expected.norm()).item()
