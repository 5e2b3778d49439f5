"""The widened draft is the small one: the same codes as rounding the widened weights gives, or none."""

import pytest
import torch

from specter_lab.compress.int4 import Int4Bank, Int4Weights, dequantize_bank, pack, quantize_bank
from specter_lab.compress.int4_widened import widened
from specter_lab.errors import UserError
from specter_lab.models.experts import ExpertBank
from specter_lab.models.widen import tiled, widen_tensor
from tests.compress.test_int4_stored import same

NAMES = {part: f"model.layers.0.mlp.experts.0.{part}_proj.weight" for part in ("gate", "up", "down")}


def small_bank(hidden=256, width=32):
    generator = torch.Generator().manual_seed(hidden + width)
    shapes = ((2, width, hidden), (2, width, hidden), (2, hidden, width))
    return ExpertBank(0, *(0.02 * torch.randn(*shape, generator=generator) for shape in shapes))


def grown_weights(bank, grown):
    """What `models.widen` makes of effective weights."""
    parts = (
        torch.stack([widen_tensor(NAMES[part], weight, grown) for weight in getattr(bank, part)]) for part in NAMES
    )
    return ExpertBank(bank.layer, *parts)


@pytest.mark.parametrize(("hidden", "width"), [(1024, 128), (768, 384), (256, 640)])
def test_it_is_the_rounded_widened_model(hidden, width):
    """Also where copies have unequal shares."""
    bank, grown = small_bank(), {"hidden": tiled(256, hidden), "expert": tiled(32, width)}
    assert same(widened(quantize_bank(bank), grown), quantize_bank(grown_weights(bank, grown)))


def test_any_codes_keep_their_function():
    """Codes that rounding would not give: effective weights widen as weights do."""
    bank, grown = small_bank(), {"hidden": tiled(256, 768), "expert": tiled(32, 1408)}
    generator = torch.Generator().manual_seed(0)

    def drawn(weights):
        codes = torch.randint(-8, 8, weights.shape, generator=generator).to(torch.int8)
        return Int4Weights(
            pack(codes), torch.rand(*weights.shape[:2], -(-weights.shape[2] // 128), generator=generator).half()
        )

    coded = Int4Bank(0, drawn(bank.gate), drawn(bank.up), drawn(bank.down))
    found, expected = dequantize_bank(widened(coded, grown)), grown_weights(dequantize_bank(coded), grown)
    assert torch.equal(found.gate, expected.gate) and torch.equal(found.up, expected.up)
    assert (found.down - expected.down).abs().max() <= 8 * 2**-25  # scales may be subnormal in FP16


def test_groups_that_would_mix():
    with pytest.raises(UserError, match="groups of 96 inputs of the widened model hold several"):
        widened(quantize_bank(small_bank()), {"hidden": tiled(256, 256), "expert": tiled(32, 96)})
