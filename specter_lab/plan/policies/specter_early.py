"""Specter's other reading: the plan of the boundary at which every layer has M predictions is the last one of the round.

Source: Specter, artifact ("cleanup when all layers have M predictions"); see `specter.py`. With fewer slots than the first
chunk's experts this is SP-E: fewer hits than `specter`, and fewer ms per token where the last plan's copies are not hidden.
"""

from __future__ import annotations

from functools import partial

from specter_lab.plan.policies.specter import ChunkedPrefetch
from specter_lab.plan.policy import Policy

POLICY = Policy(
    "specter-early", "Specter, last plan once full", "Specter, artifact", prefetch=partial(ChunkedPrefetch, last_plan=False),
    barrier=True,
)  # fmt: skip
