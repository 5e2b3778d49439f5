"""Recorded windows as rounds of a simulated model."""

import numpy as np
import pytest

from specter_lab.errors import UserError
from specter_lab.plan.workload import Workload, workload_for
from tests.plan.made import tiny_model, windows_of


def test_a_round_is_the_first_steps_of_its_windows():
    windows = windows_of(layers=2)
    now = Workload(windows, 5).round([2, 0], [3, 7], 2)
    assert now.drafted.shape == (2, 2, 5, 2) and now.depth == 2 and now.draft_needs is None
    np.testing.assert_array_equal(now.drafted[1, 0, 4], windows.draft[2, 3, 1, 0])  # layer 4 repeats layer 0
    assert now.accepted == tuple(np.minimum(windows.accepted[[2, 0], [3, 7]], 2))
    for layer in range(5):
        used = windows.target[[2, 0], [3, 7], :3, layer % 2]
        rows = slice(now.needs.first[layer], now.needs.first[layer + 1])
        experts, uses = np.unique(used, return_counts=True)
        np.testing.assert_array_equal(now.needs.experts[rows], experts)
        np.testing.assert_array_equal(now.needs.uses[rows], uses)
        weights = windows.target_weights[[2, 0], [3, 7], :3, layer % 2].astype(float)
        np.testing.assert_allclose(now.needs.weights[rows], [weights[used == e].sum() for e in experts], rtol=1e-6)
        np.testing.assert_array_equal(now.needs.token_experts[layer], used.reshape(6, 2))


def test_depth_0_is_plain_decoding():
    windows = windows_of()
    now = Workload(windows, 3).round([1], [4], 0)
    assert now.accepted == (0,) and now.drafted.shape[0] == 0
    np.testing.assert_array_equal(now.needs.token_experts[:, 0], windows.target[1, 4, 0])
    np.testing.assert_array_equal(Workload(windows, 3).decoding()[1, 4], windows.target[1, 4, 0])


def test_a_draft_with_fewer_experts_has_needs_of_its_own():
    windows = windows_of(fewer=True, layers=2)
    now = Workload(windows, 4).round([0, 1], [2, 2], 3)
    assert len(now.draft_needs) == 3
    for step, needs in enumerate(now.draft_needs):
        for layer in range(4):
            rows = slice(needs.first[layer], needs.first[layer + 1])
            np.testing.assert_array_equal(needs.experts[rows], np.unique(windows.draft[:2, 2, step, layer % 2]))


def test_rounds_are_made_once():
    workload = Workload(windows_of(), 3)
    assert workload.round([0], [1], 2) is workload.round([0], [1], 2)


def test_windows_of_another_model_are_refused():
    sentence = "the windows route over 8 experts, top-2; tiny has 60, top-4: record windows of a model with its routing geometry"
    with pytest.raises(UserError, match=sentence):
        workload_for(windows_of(), tiny_model(experts=60, top_k=4))
    assert workload_for(windows_of(fewer=True), tiny_model(layers=7)).layers == 7
    with pytest.raises(UserError, match="depth 5 was asked for, windows were recorded to depth 4"):
        Workload(windows_of(), 3).round([0], [0], 5)
