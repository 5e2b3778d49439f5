import copy

import pytest
import torch
from transformers import DynamicCache

from specter_lab.measure.kv_memory import ROOM, ExpandedLayer, append, empty_cache, expanding_once, take_columns
from specter_lab.measure.prefix import prefill
from tests.measure.conftest import build_model

B, H, D = 3, 2, 8


def numbers(columns):
    return torch.randn(B, H, columns, D)


def test_appending_equals_concatenation():
    held, whole = torch.tensor([]), numbers(0)
    for columns in (5, 1, 1, ROOM, 1, 3, 2 * ROOM, 1):
        new = numbers(columns)
        held, whole = append(held, new), torch.cat([whole, new], dim=2)
        assert torch.equal(held, whole)


def test_where_there_is_room_nothing_is_copied():
    held = append(torch.tensor([]), numbers(5))
    for _ in range(ROOM):
        longer = append(held, numbers(1))
        assert longer.data_ptr() == held.data_ptr()
        held = longer
    assert append(held, numbers(1)).data_ptr() != held.data_ptr()


@pytest.mark.parametrize(
    "held",
    [numbers(6), numbers(6)[1:], numbers(6)[:, :, 1:], numbers(6).transpose(1, 2).contiguous().transpose(1, 2)],
    ids=["full", "some rows", "some columns", "heads innermost"],
)
def test_memory_of_another_layout_is_left_alone(held):
    before, new = held.clone(), torch.randn(len(held), H, 2, D)
    assert torch.equal(append(held, new), torch.cat([before, new], dim=2)) and torch.equal(held, before)


def test_columns_are_taken_row_by_row():
    held = append(append(torch.tensor([]), numbers(5)), numbers(4))
    columns = torch.tensor([[0, 3, 8], [1, 1, 2], [8, 7, 6]])
    taken = take_columns(held, columns)
    assert torch.equal(taken, torch.take_along_dim(held, columns[:, None, :, None], dim=2))
    assert append(taken, numbers(1)).data_ptr() == taken.data_ptr()


def test_a_copy_has_room_of_its_own():
    held = append(append(torch.tensor([]), numbers(5)), numbers(1))
    other = copy.deepcopy(held)
    mine, theirs = append(held, numbers(1)), append(other, numbers(1))
    assert torch.equal(mine[:, :, :6], theirs[:, :, :6]) and not torch.equal(mine, theirs)


def test_logits_are_those_of_the_librarys_own_cache(model):
    text = torch.randint(3, 2048, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        plain, roomy = DynamicCache(config=model.config), empty_cache(model)
        for piece in (text[:, :7], text[:, 7:8], text[:, 8:]):
            expected = model(input_ids=piece, cache=plain, use_cache=True).logits
            with expanding_once(model, roomy):
                found = model(input_ids=piece, cache=roomy, use_cache=True).logits
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert roomy.get_seq_length() == plain.get_seq_length() == 12


def test_latent_attention_expands_every_token_once():
    deepseek = build_model("deepseek-nano")
    attention = deepseek.model.layers[0].self_attn
    seen = []
    handle = attention.kv_b_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[2]))
    with torch.inference_mode():
        cache = prefill(deepseek, torch.zeros(2, 9, dtype=torch.long)).cache
        with expanding_once(deepseek, cache):
            deepseek(input_ids=torch.zeros(2, 1, dtype=torch.long), cache=cache, use_cache=True)
    handle.remove()
    assert seen == [9, 1] and isinstance(cache.layers[0], ExpandedLayer)
    assert "expand_kv" not in vars(attention), "the model is as it was"
