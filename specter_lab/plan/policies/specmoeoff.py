"""SpecMoEOff as Specter's artifact re-creates it: K = 3, two prefetches at 0.2 and 0.6 of the draft, separate weights."""

from __future__ import annotations

from functools import partial

from specter_lab.plan.policies.fractions import PrefetchAt
from specter_lab.plan.policy import Policy, separate_slots

POLICY = Policy(
    "specmoeoff", "SpecMoEOff, re-created", "Specter, artifact", depth=3, slots=separate_slots,
    prefetch=partial(PrefetchAt, shares=(0.2, 0.6)), barrier=True, shares_weights=False,
)  # fmt: skip
