"""HybriMoE: a missing expert is computed by the host's cores when that ends sooner than a copy would.

The link, idle meanwhile, prefetches what the next layer probably needs (tables as in `promoe`). Simplified: experts are
given out in their order, one by one, not by a search over both queues; victims are LRU, not by HybriMoE's score; the
transfer of activations to the host and back is free.
"""

from __future__ import annotations

from specter_lab.plan.policies.promoe import NextLayer
from specter_lab.plan.policy import Policy, slots_without_draft
from specter_lab.plan.serve import CPU_IF_SOONER

POLICY = Policy(
    "hybrimoe", "HybriMoE, CPU or copy", "HybriMoE", draft=None, slots=slots_without_draft, prefetch=NextLayer, miss=CPU_IF_SOONER
)  # fmt: skip
