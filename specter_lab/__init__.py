"""A laboratory for Mixture-of-Experts language models that do not fit the GPU."""

import logging

__version__ = "0.1.0"


def _hide(logger: str, text: str) -> None:
    logging.getLogger(logger).addFilter(lambda record: text not in record.getMessage())


# Harmless messages that torchao's import prints on every machine without the GPUs it was built for.
_hide("torchao", "Failed to load")
_hide("torch.utils._pytree", "is an Enum subclass")
