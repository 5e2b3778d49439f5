"""Per-layer LRU, demand loading, no speculation: Mixtral-Offloading at the same slots (MO-SC)."""

from __future__ import annotations

from specter_lab.plan.policy import Policy

POLICY = Policy("lru", "LRU, same slots (MO-SC)", "Mixtral-Offloading", draft=None)
