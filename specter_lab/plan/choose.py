"""Which system to run in a scene: the draft's INT4 experts take memory of which the cache could make about 15 slots a layer.

Systems compete on requests the scene knows already, at equal bytes: those without a draft get its memory as slots. So the answer
says whether to draft at all, how deep, and whether the host's cores or an uneven division help; all of it is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specter_lab.errors import UserError
from specter_lab.plan.policies import find_policy
from specter_lab.plan.policy import Policy, Scene
from specter_lab.plan.simulate import simulate

LOSSLESS = (
    "specter-fast",
    "specter-uneven",
    "specter-admit",
    "specter-shared",
    "lru-s",
    "adapmoe",
    "lru-admit",
    "lru-shared",
)
DEPTHS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Choice:
    """A system, and what it takes on the requests it was tried on."""

    policy: Policy
    depth: int  # 0: no draft
    simulated_ms_per_token: float


def choose(
    scene: Scene, new_tokens: int, systems: Sequence[str] = LOSSLESS, depths: Sequence[int] = DEPTHS
) -> list[Choice]:
    """All systems at all depths, the quickest first.

    Raises:
        UserError: a scene without requests to try them on.
    """
    if scene.history is None:
        raise UserError(
            "systems are chosen by the requests that a scene knows already, and this one knows none: give it a history"
        )
    tried = []
    for policy in map(find_policy, systems):
        for depth in depths if policy.draft else (0,):
            found = simulate(scene.history, policy, replace(scene, depth=depth), new_tokens=new_tokens)
            tried.append(Choice(policy, depth, found.tpot_ms(new_tokens)["decode"]))
    return sorted(tried, key=lambda choice: choice.simulated_ms_per_token)
