"""Rolling prefetch while the draft writes; then every miss goes to whoever ends it sooner, the link or the host's cores.

Source: this project (DESIGN.md section 3), after HybriMoE and Fiddler. Nothing is copied ahead during the verification: an expert
that has not come by then is a miss, for the host's cores may be quicker.
"""

from __future__ import annotations

from specter_lab.plan.policies.specter_fast import RollingPrefetch
from specter_lab.plan.policy import NO_LOADS, Clock, Loads, Policy
from specter_lab.plan.serve import CPU_IF_SOONER, NOTHING_AHEAD, Ahead, Needs


class WhileDrafting(RollingPrefetch):
    """Stops when the draft does."""

    def rest(self, clock: Clock) -> Loads:
        return NO_LOADS

    def ahead(self, needs: Needs) -> Ahead:
        return NOTHING_AHEAD


POLICY = Policy(
    "specter-shared", "Specter, CPU shares the misses", "this project", prefetch=WhileDrafting, miss=CPU_IF_SOONER
)
