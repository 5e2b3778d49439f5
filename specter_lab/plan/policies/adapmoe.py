"""AdapMoE's uneven cache: slots are divided over the layers so that LRU hits most often (AdapMoE, section on caching).

Simplified: AdapMoE's model of hit rates is replaced by measured curves; its adaptive number of experts per token (lossy) and
its prefetching by the next layer's router are left out. Memory of the draft that it does not have becomes slots.
"""

from __future__ import annotations

from specter_lab.plan.policy import Policy, slots_without_draft
from specter_lab.plan.slots import uneven

POLICY = Policy(
    "adapmoe", "AdapMoE, uneven slots", "AdapMoE", draft=None, slots=uneven(slots_without_draft, drafts=False)
)
