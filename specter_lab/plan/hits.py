"""Hit rates by definition: one count per event in `plan.serve`, many ways to divide them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specter_lab.plan import serve as counted


@dataclass(frozen=True)
class Hits:
    """Counts behind every definition of a hit rate, over all target passes but prefills.

    An expert is *ready* when its copy has ended before its layer asks, *in flight* when it is on its way then.
    """

    counts: np.ndarray  # [NUM_COUNTS], rows as named in `plan.serve`
    weights: np.ndarray  # [3], rows as named there
    draft_uses: int  # the draft's own uses of experts
    draft_uses_ready: int  # all of them, unless the draft reads the target's experts

    def rates(self) -> dict[str, float]:
        """Hit rate by definition; NaN where nothing was asked for."""
        c = counted
        needed, needed_ready, needed_coming = self.counts[[c.NEEDED, c.NEEDED_READY, c.NEEDED_IN_FLIGHT]].tolist()
        uses, uses_ready, uses_coming = self.counts[[c.USES, c.USES_READY, c.USES_IN_FLIGHT]].tolist()
        steps, steps_ready = self.counts[[c.TOKEN_LAYERS, c.TOKEN_LAYERS_READY]].tolist()
        pairs = {
            "distinct": (needed_ready, needed),
            "distinct, in flight counted": (needed_ready + needed_coming, needed),
            "token-weighted": (uses_ready, uses),
            "token-weighted, in flight counted": (uses_ready + uses_coming, uses),
            "token-step": (steps_ready, steps),
            "token-weighted, draft counted": (uses_ready + self.draft_uses_ready, uses + self.draft_uses),
        }
        return {name: found / total if total else float("nan") for name, (found, total) in pairs.items()}

    @property
    def dropped_share(self) -> float:
        """Share of the target's routing weight whose experts were left out."""
        return self._share(counted.WEIGHT_DROPPED)

    @property
    def draft_precision_share(self) -> float:
        """Share of the target's routing weight that was computed with the draft's INT4 weights."""
        return self._share(counted.WEIGHT_IN_DRAFT_PRECISION)

    def _share(self, row: int) -> float:
        return float(self.weights[row] / self.weights[[counted.WEIGHT, counted.WEIGHT_DROPPED]].sum())
