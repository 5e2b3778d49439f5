"""Windows: with a greedy text they replay speculative and plain decoding exactly, at every depth up to the recorded one."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from specter_lab.errors import UserError
from specter_lab.measure.speculate import plain_decode, speculative_decode
from specter_lab.measure.windows import SCHEMA_VERSION, read_windows, record_windows, write_windows
from specter_lab.models.experts import with_top_k
from specter_lab.models.routing import observe_routing

P, N, K = 8, 20, 5
SETS = ("a", "b", "a")


@pytest.fixture
def prompts(make_tokens):
    return torch.stack(make_tokens((P,) * len(SETS)).ids)


def used(experts, num_experts):
    """Experts [..., L, k] of some tokens in the first axis -> bool [L, E]."""
    found = np.zeros((experts.shape[-2], num_experts), bool)
    for token in experts:
        np.put_along_axis(found, token.astype(np.int64), True, axis=1)
    return found


@pytest.mark.parametrize("depth", [1, 3, K])
def test_greedy_windows_replay_speculative_decoding(model, draft, prompts, depth):
    windows = record_windows(model, draft, prompts, SETS, new_tokens=N, max_depth=K, temperature=0.0)
    rounds = speculative_decode(model, draft, prompts, new_tokens=N, depth=depth).rounds
    for request in range(len(SETS)):
        mine = rounds.of(np.array([request]))
        position, replayed = 0, []
        for accepted, needed, predicted in zip(mine.accepted, mine.needed, mine.predicted):
            replayed.append(min(int(windows.accepted[request, position]), depth))
            target, drafted = windows.target[request, position], windows.draft[request, position]
            np.testing.assert_array_equal(used(target[: depth + 1], windows.num_experts), needed)
            np.testing.assert_array_equal(used(drafted[:depth], windows.num_experts), predicted)
            position += replayed[-1] + 1
        assert replayed == mine.accepted.tolist() and position >= N


def test_greedy_windows_replay_plain_decoding(model, draft, prompts):
    """First inputs of consecutive windows are the text: its routing is that of one pass over prompt and text."""
    windows = record_windows(model, draft, prompts, SETS, new_tokens=N, max_depth=2, temperature=0.0)
    text = plain_decode(model, prompts, new_tokens=N).tokens  # [R, N]
    whole = torch.cat([prompts, text[:, :-1]], dim=1)
    for request, ids in enumerate(whole):
        used_by = routing_of(model, ids)
        np.testing.assert_array_equal(np.sort(windows.prompt[request]), np.sort(used_by[: P - 1]))
        np.testing.assert_array_equal(np.sort(windows.target[request, :, 0]), np.sort(used_by[P - 1 :]))


def routing_of(model, ids):
    """Experts [S, L, k] of one pass over ids [S]."""
    seen = []
    with torch.inference_mode(), observe_routing(model, seen.append):
        model(ids[None])
    return torch.stack([r.indices for r in seen], dim=1).numpy()


def test_a_draft_that_is_the_target_agrees_in_everything(qwen, prompts):
    windows = record_windows(qwen, qwen, prompts, SETS, new_tokens=N, max_depth=K)
    assert (windows.accepted == K).mean() > 0.95
    same = (np.sort(windows.draft) == np.sort(windows.target[:, :, :K])).mean()
    assert same > 0.99
    assert windows.draft_weights.dtype == np.float16 and windows.accepted.max() <= K


def test_a_draft_with_fewer_experts_routes_over_the_same_ones(qwen, prompts):
    fewer = with_top_k(qwen, 2)
    windows = record_windows(qwen, fewer, prompts, SETS, new_tokens=4, max_depth=3, temperature=0.0)
    assert windows.draft.shape == (3, 4, 3, windows.layers, 2) and windows.target.shape[-1] == 4
    assert (windows.accepted < 3).any()
    first = windows.draft[:, :, 0, 0]  # before the first MoE layer draft and target are the same
    in_target = (first[..., :, None] == windows.target[:, :, 0, 0][..., None, :]).any(axis=-1)
    assert in_target.all()


def test_sampled_text_depends_on_the_seed_alone(qwen, prompts):
    def routed(seed):
        return record_windows(qwen, qwen, prompts, SETS, new_tokens=6, max_depth=1, seed=seed).target

    assert (routed(1) == routed(1)).all() and (routed(1) != routed(2)).any()


@pytest.fixture
def windows(qwen, prompts):
    return record_windows(qwen, qwen, prompts, SETS, new_tokens=4, max_depth=2)


def test_windows_survive_a_file(windows, tmp_path):
    write_windows(windows, tmp_path / "w.safetensors", model_digest="d" * 64)
    back = read_windows(tmp_path / "w.safetensors", model_digest="d" * 64)
    assert (back.num_experts, back.prompt_set) == (windows.num_experts, windows.prompt_set)
    for name in ("prompt", "draft", "draft_weights", "target", "target_weights", "accepted"):
        before, after = getattr(windows, name), getattr(back, name)
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before, after)
    assert [file.name for file in tmp_path.iterdir()] == ["w.safetensors"]


def test_some_requests(windows):
    chosen = windows.of(np.array([2, 0]))
    assert chosen.requests == 2 and chosen.prompt_set == ("a", "a")
    np.testing.assert_array_equal(chosen.target, windows.target[[2, 0]])


def test_other_files_are_refused(windows, tmp_path):
    path = tmp_path / "w.safetensors"
    write_windows(windows, path, model_digest="d" * 64)
    with pytest.raises(UserError, match="holds windows of another model .dddddddddddd, not eeeeeeeeeeee.: record them"):
        read_windows(path, model_digest="e" * 64)
    with safe_open(path, framework="numpy") as file:
        arrays, header = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    save_file(arrays, path, header | {"schema_version": str(SCHEMA_VERSION + 1)})
    with pytest.raises(UserError, match=f"schema version {SCHEMA_VERSION + 1}, this program reads {SCHEMA_VERSION}"):
        read_windows(path)
    arrays["accepted"] = arrays["accepted"] + 1
    save_file(arrays, path, header)
    with pytest.raises(UserError, match="altered since it was written"):
        read_windows(path)
    path.write_text(json.dumps({"not": "safetensors"}))
    with pytest.raises(UserError, match="not a readable windows file .*: delete it and record it again"):
        read_windows(path)


def test_bad_requests_are_one_sentence(qwen, prompts):
    with pytest.raises(UserError, match="positions"):
        record_windows(qwen, qwen, prompts, SETS, new_tokens=2048, max_depth=K)
    with pytest.raises(UserError, match="at least 2 tokens"):
        record_windows(qwen, qwen, prompts[:, :1], SETS, new_tokens=4, max_depth=K)
