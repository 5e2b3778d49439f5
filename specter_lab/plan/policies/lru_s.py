"""LRU-S: LRU with the draft's memory turned into slots: Mixtral-Offloading at the same memory (MO-SM)."""

from __future__ import annotations

from specter_lab.plan.policy import Policy, slots_without_draft

POLICY = Policy("lru-s", "LRU, same memory (MO-SM)", "Specter, hit rate", draft=None, slots=slots_without_draft)
