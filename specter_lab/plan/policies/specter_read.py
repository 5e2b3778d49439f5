"""Fast mode whose misses are read through: the expert kernel itself reads them from pinned host memory, over the link.

Source: this project (DESIGN.md section 3). Simplified: a kernel that reads through computes when all of the expert has come.
"""

from __future__ import annotations

from specter_lab.plan.policies.specter_fast import RollingPrefetch
from specter_lab.plan.policy import Policy
from specter_lab.plan.serve import READ_THROUGH

POLICY = Policy(
    "specter-read", "fast mode, misses read through", "this project", prefetch=RollingPrefetch, miss=READ_THROUGH
)
