"""Other people's systems: whether they are here, and what a row says of one that was not run."""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, version

NOT_INSTALLED = "not run: not installed"


def found(looked_for: str) -> str | None:
    """The version of an installed package, or the path of a program; None: there is neither."""
    try:
        return version(looked_for)
    except PackageNotFoundError:
        return shutil.which(looked_for)
