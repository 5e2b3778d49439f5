import copy

import numpy as np
import pytest
import torch

from specter_lab.errors import UserError
from specter_lab.measure.draft import free_running_draft
from specter_lab.measure.fidelity import DEFINITIONS, compare
from specter_lab.measure.prefix import prefill, read
from specter_lab.measure.speculate import propose
from specter_lab.measure.trace import DECODE, Origin
from specter_lab.models.adapters import adapter_for
from specter_lab.models.routing import observe_routing

P, K = 8, 6


def run(target, draft, tokens, **options):
    origin = Origin("random", "0123")
    return free_running_draft(target, draft, tokens, origin, origin, prefix_tokens=P, depth=K, **options)


def inputs(windows):
    return torch.from_numpy(windows.draft.token_id.reshape(-1, K)).long()  # [R, K]


def routing_of(model, ids):
    """Indices [S, L, k] of a plain forward pass over ids [S]."""
    seen = []
    with observe_routing(model, seen.append):
        model(ids[None])
    return torch.stack([r.indices for r in seen], dim=1).numpy()


def test_draft_that_is_the_target_matches_exactly(model, make_tokens):
    windows = run(model, model, make_tokens((8, 12, 30)))
    assert (windows.accepted == K).all()
    result = compare(windows.target, windows.draft)
    for name in DEFINITIONS:  # K steps of one token round differently from one pass of K: weights may differ in 1e-6
        values = getattr(result, name)
        assert values.min() > 1 - 1e-5 if name == "weighted_overlap" else (values == 1).all(), name


def test_window_is_the_greedy_continuation(model, make_tokens):
    tokens = make_tokens((8, 12))
    windows = run(model, model, tokens)
    for ids, window in zip(tokens.ids, inputs(windows)):
        text = ids[:P]
        for _ in range(K - 1):
            text = torch.cat([text, model(text[None]).logits[0, -1:].argmax(-1)])
        np.testing.assert_array_equal(window, text[P - 1 :])


def test_verification_equals_a_plain_forward_pass(model, draft, make_tokens):
    """Whatever the draft did to its copy of the cache, the target's logits are those of reading the whole text."""
    prefix = torch.stack(make_tokens((P, P, P)).ids)
    with torch.inference_mode():
        shared = prefill(model, prefix[:, :-1])
        window, *_ = propose(draft, copy.deepcopy(shared), prefix[:, -1:], K, 0.0, torch.Generator())
        logits, _ = read(model, shared, window[:, :-1])
        plain = model(torch.cat([prefix[:, :-1], window[:, :-1]], dim=1)).logits[:, P - 1 :]
    torch.testing.assert_close(logits, plain, atol=2e-4, rtol=1e-4)


def test_target_side_equals_an_oracle_without_cache(model, draft, make_tokens):
    tokens = make_tokens((8, 12, 30, 9))
    windows = run(model, draft, tokens)
    for r, (ids, window) in enumerate(zip(tokens.ids, inputs(windows))):
        text = torch.cat([ids[: P - 1], window])
        routed = windows.target.indices[windows.target.request_index == r]
        np.testing.assert_array_equal(routed, routing_of(model, text)[P - 1 :])
        predicted = model(text[None]).logits[0, P - 1 :].argmax(-1)
        agreed = 0
        while agreed < K - 1 and predicted[agreed] == window[agreed + 1]:
            agreed += 1
        assert min(windows.accepted[r], K - 1) == agreed  # the trace does not hold x_K


def test_draft_side_equals_an_oracle_without_cache(model, draft, make_tokens):
    """Target and draft differ in the experts only: compute prefix rows with the one's, window rows with the other's."""
    tokens = make_tokens((8, 12, 30))
    windows = run(model, draft, tokens)
    pairs = zip(*(adapter_for(model.config).moe_layers(m) for m in (model, draft)))

    def mix(drafts_experts):
        def hook(_module, args, output):
            return torch.cat([output[: P - 1], drafts_experts(*args)[P - 1 :]])

        return hook

    handles = [ours.experts.register_forward_hook(mix(theirs.experts)) for ours, theirs in pairs]
    try:
        for r, (ids, window) in enumerate(zip(tokens.ids, inputs(windows))):
            expected = routing_of(model, torch.cat([ids[: P - 1], window]))[P - 1 :]
            np.testing.assert_array_equal(windows.draft.indices[windows.draft.request_index == r], expected)
    finally:
        for handle in handles:
            handle.remove()


def test_batched_equals_one_request_at_a_time(model, draft, make_tokens):
    tokens = make_tokens((8, 12, 30, 9, 8))
    batched, single = run(model, draft, tokens), run(model, draft, tokens, token_budget=P)
    np.testing.assert_array_equal(batched.accepted, single.accepted)
    for a, b in ((batched.draft, single.draft), (batched.target, single.target)):
        np.testing.assert_array_equal(a.token_id, b.token_id)
        np.testing.assert_array_equal(a.indices, b.indices)
        np.testing.assert_allclose(a.weights, b.weights, atol=1e-5)


def test_a_noisy_draft_is_close_but_not_equal(model, draft, make_tokens):
    windows = run(model, draft, make_tokens([10] * 20))
    overlap = compare(windows.target, windows.draft).overlap.mean()
    assert 0.5 < overlap < 1
    assert 0 < windows.accepted.mean() < K


def test_rows_say_which_token_they_are(qwen, make_tokens):
    windows = run(qwen, qwen, make_tokens((9, 8)))
    for trace in (windows.draft, windows.target):
        np.testing.assert_array_equal(trace.request_index, [0] * K + [1] * K)
        np.testing.assert_array_equal(trace.position, [*range(P - 1, P - 1 + K)] * 2)
        assert (trace.phase == DECODE).all()
    assert (windows.draft.protocol, windows.target.protocol) == ("free-running-draft", "verification")


def test_bad_requests(qwen, make_tokens):
    with pytest.raises(UserError, match="'r1' has 7 tokens, the prefix needs 8"):
        run(qwen, qwen, make_tokens((8, 7)))
    origin = Origin("random", "0123")
    with pytest.raises(UserError, match="the model has 2048"):
        free_running_draft(qwen, qwen, make_tokens((2040,)), origin, origin, prefix_tokens=2040, depth=9)
