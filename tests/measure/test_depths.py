import numpy as np
import pytest
import torch

from specter_lab.errors import UserError
from specter_lab.measure import depths
from specter_lab.measure.depths import greedy_rounds
from specter_lab.measure.speculate import speculative_decode

P, N = 8, 24
DEPTHS = (1, 3, 5, 12)


@pytest.fixture
def prompts(make_tokens):
    return torch.stack(make_tokens((P,) * 4).ids)


def test_every_depth_has_the_rounds_of_its_own_run(model, draft, prompts):
    found = greedy_rounds(model, draft, prompts, new_tokens=N, depths=DEPTHS)
    assert tuple(found) == DEPTHS
    for depth, rounds in found.items():
        alone = speculative_decode(model, draft, prompts, new_tokens=N, depth=depth).rounds
        order = np.lexsort((alone.position, alone.request))
        for name in ("request", "position", "accepted", "needed", "predicted"):
            np.testing.assert_array_equal(
                getattr(rounds, name), getattr(alone, name)[order], err_msg=f"{name}, {depth}"
            )


def test_no_window_is_drafted_twice(model, draft, prompts, monkeypatch):
    drafted = []
    run = depths._run

    def counted(*arguments):
        drafted.extend(arguments[-2])
        return run(*arguments)

    monkeypatch.setattr(depths, "_run", counted)
    rounds = greedy_rounds(model, draft, prompts, new_tokens=N, depths=DEPTHS)
    assert len(drafted) == len(set(drafted)) < sum(len(found.request) for found in rounds.values())


def test_bad_input_is_one_sentence(qwen, prompts):
    with pytest.raises(UserError, match="need 2068 positions, the model has 2048"):
        greedy_rounds(qwen, qwen, prompts, new_tokens=2048, depths=(2, 12))
