import copy
import time

import numpy as np
import pytest
import torch

from specter_lab.errors import UserError
from specter_lab.measure.bench_capture import plain_forward
from specter_lab.measure.capture import TOKEN_BUDGET, capture, forward_with_routing, length_batches
from specter_lab.measure.trace import PREFILL
from specter_lab.models.adapters import adapter_for
from specter_lab.models.routing import observe_routing

LENGTHS = (23, 1, 7, 12, 23, 5)


def alone(model, ids):
    """One request, no padding: indices, weights and logits, each [S, L, .]."""
    seen = []
    with observe_routing(model, seen.append):
        model(ids[None])
    return [torch.stack([getattr(r, name) for r in seen], 1).numpy() for name in ("indices", "weights", "logits")]


def test_padded_batches_equal_single_runs(model, make_tokens, origin):
    tokens = make_tokens(LENGTHS)
    trace = capture(model, tokens, origin, keep_logits=True, token_budget=50)
    assert len(length_batches(np.array(LENGTHS), 50)) == 2  # (1, 5, 7, 12) and (23, 23): the first is padded
    indices, weights, logits = (np.concatenate(x) for x in zip(*(alone(model, ids) for ids in tokens.ids)))
    np.testing.assert_array_equal(trace.indices, indices)
    np.testing.assert_allclose(trace.weights, weights, atol=1e-5)
    np.testing.assert_allclose(trace.logits, logits, atol=1e-4)
    np.testing.assert_array_equal(trace.scores, np.take_along_axis(trace.logits, indices, axis=2))


def test_rows_say_which_token_they_are(qwen, make_tokens, origin):
    tokens = make_tokens(LENGTHS)
    trace = capture(qwen, tokens, origin, token_budget=50)
    np.testing.assert_array_equal(trace.request_index, np.repeat(np.arange(6), LENGTHS))
    np.testing.assert_array_equal(trace.position, np.concatenate([np.arange(n) for n in LENGTHS]))
    np.testing.assert_array_equal(trace.token_id, torch.cat(tokens.ids))
    assert (trace.phase == PREFILL).all()
    assert trace.protocol == "teacher-forced" and trace.request_ids == ("r0", "r1", "r2", "r3", "r4", "r5")


def test_shapes_and_types(model, make_tokens, origin):
    trace = capture(model, make_tokens((4, 3)), origin)
    layers = [layer.index for layer in adapter_for(model.config).moe_layers(model)]
    assert trace.layers == tuple(layers)
    assert trace.indices.shape == trace.weights.shape == trace.scores.shape
    assert trace.indices.shape == (7, len(layers), model.config.num_experts_per_tok)
    assert (trace.indices.dtype, trace.weights.dtype, trace.scores.dtype) == (np.uint8, np.float32, np.float32)
    assert trace.logits is None
    assert trace.num_experts == adapter_for(model.config).num_experts(model.config)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_weights_are_after_and_scores_before_softmax(qwen, make_tokens, origin, dtype):
    trace = capture(copy.deepcopy(qwen).to(dtype), make_tokens((9,)), origin, keep_logits=True)
    probabilities = torch.tensor(trace.logits).softmax(-1).to(dtype).float().numpy()  # Qwen does not renormalise
    used = np.take_along_axis(probabilities, trace.indices.astype(int), axis=2)
    np.testing.assert_allclose(trace.weights, used, rtol=1e-6)


def test_nan_names_the_layer(model, make_tokens, origin):
    broken = copy.deepcopy(model)
    layer = adapter_for(model.config).moe_layers(broken)[1]
    layer.router.weight[3] = float("nan")
    with pytest.raises(UserError, match=f"decoder layer {layer.index} produced NaN"):
        capture(broken, make_tokens((4,)), origin)


def test_every_layer_reports_exactly_once(qwen):
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(RuntimeError, match="reported for layers"):
        forward_with_routing(qwen, lambda: (qwen(ids), qwen(ids)), torch.arange(3))
    with pytest.raises(RuntimeError, match="reported for layers"):
        forward_with_routing(qwen, lambda: qwen.model.layers[0].mlp(torch.zeros(1, 3, 256)), torch.arange(3))


def test_prompt_longer_than_the_context(qwen, make_tokens, origin):
    with pytest.raises(UserError, match="'r1' needs 2049 positions, the model has 2048"):
        capture(qwen, make_tokens((3, 2049)), origin)


@pytest.mark.parametrize("budget", (1, 64, 10_000))
def test_batches_hold_every_request_once_within_the_budget(budget):
    lengths = np.random.default_rng(0).integers(1, 100, 50)
    batches = length_batches(lengths, budget)
    assert sorted(np.concatenate(batches)) == list(range(50))
    assert all(len(b) == 1 or len(b) * lengths[b].max() <= budget for b in batches)
    assert len(batches) == (50 if budget == 1 else len(batches))
    assert budget != 10_000 or len(batches) == 1


def test_capture_costs_little(qwen, make_tokens, origin):
    """CPU seconds, fastest of five runs taking turns: 15 % is the promise, the rest is room for a busy machine."""
    tokens = make_tokens([100] * 40)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads spin while they wait, which would count as work
    runs = {
        "plain": lambda: plain_forward(qwen, tokens, TOKEN_BUDGET),
        "capture": lambda: capture(qwen, tokens, origin),
    }
    best_s = dict.fromkeys(runs, float("inf"))
    for _ in range(5):
        for name, run in runs.items():
            start = time.process_time()
            run()
            best_s[name] = min(best_s[name], time.process_time() - start)
    torch.set_num_threads(threads)
    assert best_s["capture"] < 1.3 * best_s["plain"]
    assert best_s["capture"] < 4  # 4000 tokens: a fifth of 200 requests x 100 tokens, 0.5 s on a free core
