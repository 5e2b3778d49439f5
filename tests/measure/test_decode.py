import numpy as np
import pytest
import torch

from specter_lab.errors import UserError
from specter_lab.measure.decode import before_end, decode
from specter_lab.measure.trace import DECODE, Origin, read_trace, write_trace
from specter_lab.models.routing import observe_routing

P, N = 6, 10


def texts_of(trace):
    return [trace.token_id[trace.request_index == r] for r in range(len(trace.request_ids))]


def test_greedy_equals_reading_the_whole_text_again(model, make_tokens, origin):
    """An oracle without cache: append the best token, read everything, keep the last position's routing."""
    tokens = make_tokens((P, P + 5))
    trace = decode(model, tokens, origin, prefix_tokens=P, new_tokens=N)
    for r, ids in enumerate(tokens.ids):
        text, routed = ids[:P], []
        with torch.inference_mode():
            for _ in range(N):
                seen = []
                with observe_routing(model, seen.append):
                    logits = model(text[None]).logits[0, -1]
                routed.append(torch.stack([s.indices[-1] for s in seen]))
                text = torch.cat([text, logits.argmax()[None]])
        kept = int(before_end(text[None, P - 1 : -1], model.config.eos_token_id).sum())
        np.testing.assert_array_equal(texts_of(trace)[r], text[P - 1 : -1][:kept])
        np.testing.assert_array_equal(trace.indices[trace.request_index == r], torch.stack(routed)[:kept])


def test_rows_say_what_they_are(qwen, make_tokens, origin, tmp_path):
    trace = decode(qwen, make_tokens((8, 9, 8)), origin, prefix_tokens=P, new_tokens=N)
    assert trace.protocol == "greedy-decode" and (trace.phase == DECODE).all()
    for r in range(3):
        position = trace.position[trace.request_index == r]
        np.testing.assert_array_equal(position, P - 1 + np.arange(len(position)))
    assert (np.diff(trace.request_index) >= 0).all()
    write_trace(trace, tmp_path / "t.parquet")
    np.testing.assert_array_equal(read_trace(tmp_path / "t.parquet").indices, trace.indices)


def test_batches_do_not_matter_when_greedy(model, make_tokens, origin):
    tokens = make_tokens((8, 12, 9, 30, 8))
    together, apart = (decode(model, tokens, origin, prefix_tokens=P, new_tokens=N, batch=b) for b in (5, 2))
    np.testing.assert_array_equal(together.token_id, apart.token_id)
    np.testing.assert_array_equal(together.indices, apart.indices)


def test_sampling_follows_the_seed_and_the_temperature(qwen, make_tokens):
    tokens = make_tokens((8,) * 6)

    def sampled(seed, temperature=1.0):
        return decode(
            qwen, tokens, Origin("random", "0", seed=seed), prefix_tokens=P, new_tokens=N, temperature=temperature
        )

    assert sampled(0).protocol == "sampled-decode"
    np.testing.assert_array_equal(sampled(0).token_id, sampled(0).token_id)
    assert sampled(0).token_id.tolist() != sampled(1).token_id.tolist()
    greedy = decode(qwen, tokens, Origin("random", "0"), prefix_tokens=P, new_tokens=N)
    np.testing.assert_array_equal(sampled(0, temperature=1e-4).token_id, greedy.token_id)


def test_what_follows_the_end_is_left_out():
    inputs = torch.tensor([[2, 5, 6, 7], [5, 2, 6, 2], [5, 6, 3, 7], [5, 6, 7, 8]])
    expected = [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert before_end(inputs, [2, 3]).int().tolist() == expected
    assert before_end(inputs, 2).int().tolist()[2] == [1, 1, 1, 1]
    assert before_end(inputs, None).all()


def test_bad_requests(qwen, make_tokens, origin):
    with pytest.raises(UserError, match="'r1' has 5 tokens, the prefix needs 6"):
        decode(qwen, make_tokens((8, 5)), origin, prefix_tokens=P, new_tokens=N)
    with pytest.raises(UserError, match="needs 2054 positions, the model has 2048"):
        decode(qwen, make_tokens((8, 8)), origin, prefix_tokens=P, new_tokens=2048)
