"""MoE-APEX: a missing expert is computed in low precision instead of being waited for; changes the output.

The low precision is the draft's INT4, which lies on the GPU anyway. Prefetching is that of the fast mode. Simplified: MoE-APEX
chooses the precision by the gate's weight and loads the important ones; here every miss is INT4, and the share of routing
weight that was computed so is reported. Accepted tokens are those of the exact verification.
"""

from __future__ import annotations

from specter_lab.plan.policies.specter_fast import RollingPrefetch
from specter_lab.plan.policy import Policy
from specter_lab.plan.serve import DRAFT_WEIGHTS

POLICY = Policy(
    "moe-apex", "MoE-APEX, INT4 on a miss", "MoE-APEX", prefetch=RollingPrefetch, miss=DRAFT_WEIGHTS, lossy=True
)
