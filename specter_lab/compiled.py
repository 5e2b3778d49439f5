"""`compiled`: machine code where Numba is installed, plain Python where it is not; the same functions either way.

It runs without the interpreter's lock, so threads run side by side. Machine code is kept between runs, in a folder named after the sources it was made from: Numba itself does not notice when a
function called from another file has changed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from specter_lab import paths

Function = TypeVar("Function", bound=Callable)

_PACKAGES = ("compress", "plan")  # whose functions are compiled
_SOURCES = sorted(file for part in _PACKAGES for file in (Path(__file__).parent / part).glob("**/*.py"))
_DIGEST = hashlib.sha256(b"".join(file.read_bytes() for file in _SOURCES)).hexdigest()[:16]
os.environ.setdefault("NUMBA_CACHE_DIR", str(paths.CACHE / "numba" / _DIGEST))

try:
    from numba import njit
except ImportError:

    def compiled(function: Function) -> Function:
        """The function as it is."""
        return function
else:
    compiled = njit(cache=True, nogil=True)
