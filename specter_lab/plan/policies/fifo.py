"""FIFO: the expert that came first goes first; demand loading, no speculation. The simplest order there is."""

from __future__ import annotations

from specter_lab.plan.policy import Policy
from specter_lab.plan.residency import FIFO

POLICY = Policy("fifo", "FIFO, same slots", "textbook", draft=None, order=FIFO)
