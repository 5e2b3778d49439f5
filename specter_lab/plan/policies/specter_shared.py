"""Rolling prefetch while the draft writes; then every miss goes to whoever ends it sooner, the link or the host's cores.

Source: this project (DESIGN.md section 3), after HybriMoE and Fiddler. During the verification experts of later layers are copied
behind each layer's misses, as many as keep the link busy until the next layer's routing is known; not more, for an expert that has
not been asked for by then is a miss, and the host's cores may be quicker.
"""

from __future__ import annotations

import numpy as np

from specter_lab.plan.policies.specter_fast import UNSEEN, RollingPrefetch, hand_out
from specter_lab.plan.policy import NO_LOADS, Clock, Loads, Policy
from specter_lab.plan.serve import CPU_IF_SOONER, NOTHING_AHEAD, Ahead, Needs

REST_MS = 0.4  # from a layer's last miss to the next layer's first, on an H200 with 9 tokens


class BesideTheCores(RollingPrefetch):
    """Goes on during the verification, as far as the link would rest."""

    def rest(self, clock: Clock) -> Loads:
        return NO_LOADS

    def verifying(self, layer: int, token_experts: np.ndarray, clock: Clock) -> Loads:
        self._wanted_at[: layer + 1] = UNSEEN  # their layers have passed
        return hand_out(self._wanted_at, max(1, int(REST_MS / clock.copy_ms)))

    def ahead(self, needs: Needs) -> Ahead:
        return NOTHING_AHEAD


POLICY = Policy(
    "specter-shared", "Specter, CPU shares the misses", "this project", prefetch=BesideTheCores, miss=CPU_IF_SOONER
)
