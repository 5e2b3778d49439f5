"""Fast mode whose kernels load what is missing into slots instead of reading it through: it is there the next time (this project).

The host names victims before a pass and learns afterwards who has taken their slots. At depth 0 this is LRU without the host.
"""

from __future__ import annotations

from dataclasses import replace

from specter_lab.plan.policies import specter_fast
from specter_lab.plan.serve import ADMIT

POLICY = replace(specter_fast.POLICY, id="specter-admit", title="Specter, kernels load misses", miss=ADMIT)
