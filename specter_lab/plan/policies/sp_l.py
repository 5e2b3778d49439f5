"""SP-L: a single prefetch, when the draft has ended."""

from __future__ import annotations

from functools import partial

from specter_lab.plan.policies.fractions import PrefetchAt
from specter_lab.plan.policy import Policy

POLICY = Policy(
    "sp-l", "single prefetch, late", "Specter, hit rate", prefetch=partial(PrefetchAt, shares=(1.0,)), barrier=True
)
