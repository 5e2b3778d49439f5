import copy

import pytest
import torch

from specter_lab.errors import UserError
from specter_lab.measure.prefix import prefill, read, write

TEXT = torch.randint(3, 2048, (3, 20), generator=torch.Generator().manual_seed(5))
NEXT = torch.randint(3, 2048, (3, 4), generator=torch.Generator().manual_seed(6))


def logits_after(model, text, new):
    """Without a cache: logits of the tokens `new` after `text`, one request."""
    return model(torch.cat([text, new])[None]).logits[0, len(text) :]


def test_rows_of_different_lengths_read_as_if_alone(model):
    """Forgetting shortens rows unevenly; every row still sees its own text at its own positions, and nothing else."""
    dropped = torch.tensor([0, 7, 3])
    with torch.inference_mode():
        prefix = prefill(model, TEXT)
        prefix.forget(dropped)
        assert prefix.lengths.tolist() == [20, 13, 17]
        logits, routing = read(model, prefix, NEXT)
        for row in range(3):
            alone = logits_after(model, TEXT[row, : 20 - dropped[row]], NEXT[row])
            torch.testing.assert_close(logits[row], alone, atol=2e-4, rtol=1e-4)
    assert prefix.lengths.tolist() == [24, 17, 21] and len(routing.indices) == 12


def test_equal_rows_are_read_once_and_stay_independent(model):
    seen = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    with torch.inference_mode():
        prefix = prefill(model, TEXT[[0, 1, 0, 0]])
        hook.remove()
        assert seen == [(2, 20)]
        prefix.forget(torch.tensor([4, 0, 0, 9]))
        logits, _ = read(model, prefix, NEXT[[0, 1, 0, 2]])
        texts = (TEXT[0, :16], NEXT[0]), (TEXT[1], NEXT[1]), (TEXT[0], NEXT[0]), (TEXT[0, :11], NEXT[2])
        for row, (text, new) in enumerate(texts):
            torch.testing.assert_close(logits[row], logits_after(model, text, new), atol=2e-4, rtol=1e-4)


def test_forget_again_and_again(model):
    with torch.inference_mode():
        prefix = prefill(model, TEXT)
        for dropped in ([5, 1, 2], [0, 4, 9], [1, 1, 1]):
            prefix.forget(torch.tensor(dropped))
        prefix.keep_rows(torch.tensor([True, False, True]))
        assert prefix.lengths.tolist() == [14, 8] and prefix.cache.get_seq_length() == 14
        logits, _ = read(model, prefix, NEXT[:2])
        for row, text in enumerate((TEXT[0, :14], TEXT[2, :8])):
            torch.testing.assert_close(logits[row], logits_after(model, text, NEXT[row]), atol=2e-4, rtol=1e-4)


def test_a_copy_is_independent(qwen):
    with torch.inference_mode():
        prefix = prefill(qwen, TEXT)
        keys = prefix.cache.layers[0].keys.clone()
        spoilt = copy.deepcopy(prefix)
        list(write(qwen, spoilt, NEXT[:, :1], 3, 1.0, torch.Generator()))
        spoilt.forget(torch.tensor([9, 9, 9]))
    assert prefix.lengths.tolist() == [20] * 3 and torch.equal(prefix.cache.layers[0].keys, keys)


def test_greedy_writing_equals_decoding_without_cache(qwen):
    with torch.inference_mode():
        tokens = torch.cat([t for t, *_ in write(qwen, prefill(qwen, TEXT), NEXT[:, :1], 5, 0.0, torch.Generator())], 1)
        for row in range(3):
            text = torch.cat([TEXT[row], NEXT[row, :1]])
            for _ in range(5):
                text = torch.cat([text, qwen(text[None]).logits[0, -1:].argmax(-1)])
            assert tokens[row].tolist() == text[-5:].tolist()


def test_nan_output_is_one_sentence(qwen):
    damaged = copy.deepcopy(qwen)
    head = damaged.lm_head.weight.clone()
    head[7] = float("nan")
    damaged.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    with torch.inference_mode(), pytest.raises(UserError, match="the output of the qwen2_moe model is NaN"):
        read(damaged, prefill(damaged, TEXT), NEXT)
