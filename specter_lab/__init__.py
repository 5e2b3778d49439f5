"""A laboratory for Mixture-of-Experts language models that do not fit the GPU."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specter_lab.engine.api import Engine

__version__ = "0.1.0"


def _hide(logger: str, text: str) -> None:
    logging.getLogger(logger).addFilter(lambda record: text not in record.getMessage())


def load(model: str, **options: Any) -> Engine:
    """A model served with its routed experts in host memory; see `specter_lab.engine.api.load`."""
    from specter_lab.engine import api

    return api.load(model, **options)


# Harmless messages that torchao's import prints on every machine without the GPUs it was built for.
_hide("torchao", "Failed to load")
_hide("torch.utils._pytree", "is an Enum subclass")
