"""No draft, its memory turned into slots, and kernels load what is missing: plain decoding that never waits for the host."""

from __future__ import annotations

from dataclasses import replace

from specter_lab.plan.policies import lru_s
from specter_lab.plan.serve import ADMIT

POLICY = replace(
    lru_s.POLICY, id="lru-admit", title="LRU, same memory, kernels load", source="this project", miss=ADMIT
)
