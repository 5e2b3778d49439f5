"""MoE-Spec: at verification a layer computes only as many experts as its budget allows; changes the output.

The experts with the largest summed routing weights over the window are kept, as many as the layer has slots and at least
twice the top-k. Everything else is Specter in paper mode, so the two differ by the budget alone. Simplified: accepted tokens are
those of the exact verification, for what the lossy one would accept is not recorded; the weight that was dropped is reported.
"""

from __future__ import annotations

from specter_lab.plan.policies.specter import ChunkedPrefetch
from specter_lab.plan.policy import Policy, Scene


def expert_budget(scene: Scene) -> int:
    """Experts that a layer may compute at verification."""
    return max(2 * scene.costs.model.top_k, scene.slots_per_layer)


POLICY = Policy(
    "moe-spec", "MoE-Spec, expert budget", "MoE-Spec", prefetch=ChunkedPrefetch, verify_experts=expert_budget,
    barrier=True, lossy=True,
)  # fmt: skip
