"""No draft, its memory turned into slots, and the host's cores share the misses with the link: HybriMoE without its prefetch."""

from __future__ import annotations

from specter_lab.plan.policy import Policy, slots_without_draft
from specter_lab.plan.serve import CPU_IF_SOONER

POLICY = Policy(
    "lru-shared",
    "LRU, same memory, CPU shares",
    "this project",
    draft=None,
    slots=slots_without_draft,
    miss=CPU_IF_SOONER,
)
