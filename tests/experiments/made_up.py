"""Made-up recordings in the place of a zoo model's: what simulated experiments are tested on, in seconds."""

from dataclasses import replace

import numpy as np

from specter_lab.experiments.specter.setting import priced_as
from specter_lab.measure.prompts import PROMPT_SETS
from tests.plan.made import windows_of

PER_SET, POSITIONS = 3, 24


def windows(model, seed=0, draft="int4"):
    """Three requests of every prompt set, with the routing geometry of a zoo model."""
    anatomy = priced_as(model)
    made = windows_of(
        seed, requests=PER_SET * len(PROMPT_SETS), positions=POSITIONS, depth=16, layers=2, experts=anatomy.num_experts,
        top_k=anatomy.top_k,
    )  # fmt: skip
    return replace(made, prompt_set=tuple(np.repeat(PROMPT_SETS, PER_SET).tolist()))


def use(monkeypatch):
    """Put made-up windows in the place of recorded ones; one request of every set is history."""
    from specter_lab.experiments.specter import offload

    monkeypatch.setattr(offload, "_windows", windows)
    monkeypatch.setattr(offload, "HISTORY_PER_SET", 1)
    monkeypatch.setattr(offload, "NEW_TOKENS", POSITIONS)
