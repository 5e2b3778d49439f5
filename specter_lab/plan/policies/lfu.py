"""LFU: the expert that was used in the fewest passes goes first; demand loading, no speculation.

Source: the textbook's "perfect" LFU: uses are counted for good, also of experts that have been evicted, and never aged.
"""

from __future__ import annotations

from specter_lab.plan.policy import Policy
from specter_lab.plan.residency import LFU

POLICY = Policy("lfu", "LFU, same slots", "textbook", draft=None, order=LFU)
