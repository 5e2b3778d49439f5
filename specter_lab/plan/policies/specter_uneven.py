"""Fast mode with slots divided over the layers by what they are worth (this project, after AdapMoE)."""

from __future__ import annotations

from dataclasses import replace

from specter_lab.plan.policies import specter_fast
from specter_lab.plan.policy import equal_slots
from specter_lab.plan.slots import uneven

POLICY = replace(
    specter_fast.POLICY, id="specter-uneven", title="Specter, uneven slots", slots=uneven(equal_slots, drafts=True)
)
