"""SP-E: a single prefetch, early in the draft."""

from __future__ import annotations

from functools import partial

from specter_lab.plan.policies.fractions import PrefetchAt
from specter_lab.plan.policy import Policy

POLICY = Policy(
    "sp-e", "single prefetch, early", "Specter, hit rate", prefetch=partial(PrefetchAt, shares=(0.2,)), barrier=True
)
