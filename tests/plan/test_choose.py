"""The planner's choice between drafting and caching."""

from dataclasses import replace

import pytest

from specter_lab.errors import UserError
from specter_lab.plan.choose import choose
from specter_lab.plan.simulate import simulate
from tests.plan.made import scene_of, windows_of


def test_it_tries_all_and_ranks_them():
    windows = windows_of(positions=20)
    _, scene = scene_of(windows, slots=4)
    tried = choose(scene, 20, depths=(1, 4))
    times = [choice.simulated_ms_per_token for choice in tried]
    assert times == sorted(times) and len(tried) == 4 * 2 + 4
    best = tried[0]
    again = simulate(scene.history, best.policy, replace(scene, depth=best.depth), new_tokens=20)
    assert again.tpot_ms(20)["decode"] == best.simulated_ms_per_token


def test_a_draft_that_is_never_right_is_dropped():
    windows = windows_of(positions=20)
    wrong = replace(windows, accepted=windows.accepted * 0)
    _, scene = scene_of(wrong, slots=4, history=wrong)
    assert choose(scene, 20, depths=(1, 4))[0].depth == 0


def test_a_draft_that_is_always_right_and_costs_nothing_is_kept():
    windows = windows_of(positions=20)
    right = replace(windows, accepted=windows.accepted * 0 + 4)
    _, scene = scene_of(right, slots=8, history=right, draft_step_ms=0.01)
    assert choose(scene, 20, depths=(1, 4))[0].depth == 4


def test_without_requests_there_is_no_choice():
    _, scene = scene_of(windows_of())
    with pytest.raises(UserError, match="give it a history"):
        choose(replace(scene, history=None), 4)
