"""What every launch needs to know about the GPU it runs on."""

from __future__ import annotations

from functools import cache

import torch

MAX_TOKENS = 64  # of one launch over experts; longer inputs are cut by the caller (results do not depend on the cut)


@cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends (programmatic dependent launch, compute capability 9)."""
    return torch.cuda.get_device_capability(device) >= (9, 0)
