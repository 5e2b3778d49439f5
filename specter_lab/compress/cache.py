"""Folders that are either whole or not there, whoever else is writing and whatever goes wrong."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from specter_lab.errors import UserError
from specter_lab.models.load import sha256_of

MANIFEST = "MANIFEST.json"  # file name -> sha256 of every weight file
_WEIGHTS = ("*.safetensors", "*.gguf")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the system drops it when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_disk_full(error: Exception) -> bool:
    """Python says so by errno, the safetensors writer in its message, NumPy's `tofile` by a short write."""
    told = any(f"(os error {code})" in str(error) for code in _NO_SPACE)
    short_write = isinstance(error, OSError) and error.errno is None and "requested and" in str(error)
    return getattr(error, "errno", None) in _NO_SPACE or told or short_write


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, building it first if it is not there.

    `build` fills a folder beside it, which takes the final name in one step at the end; what a killed process left
    of it is thrown away by the next. A second process waits for the first and uses its result.

    Raises:
        UserError: the disk is full; nothing is left behind.
    """
    if folder.exists():
        return folder
    partial = folder.with_name(folder.name + ".partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")):
            if not folder.exists():
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                try:
                    build(partial)
                    _write_manifest(partial)
                    partial.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except Exception as error:
        if _is_disk_full(error):
            raise UserError(
                f"no space left on the disk of {folder.parent} while making {folder.name}: free some, or set "
                f"SPECTER_LAB_OUT to a folder on another disk"
            ) from error
        raise
    return folder


def _weight_files(folder: Path) -> list[Path]:
    return sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))


def _write_manifest(folder: Path) -> None:
    hashes = {path.name: sha256_of(path) for path in _weight_files(folder)}
    (folder / MANIFEST).write_text(json.dumps(hashes, indent=2))


def verify_manifest(folder: Path) -> None:
    """Check the weight files of a folder against its manifest; a folder without one (a download) passes.

    Raises:
        UserError: a file is missing or was altered.
    """
    manifest = folder / MANIFEST
    if not manifest.exists():
        return
    for name, expected in json.loads(manifest.read_text()).items():
        actual = sha256_of(folder / name) if (folder / name).exists() else "missing"
        if actual != expected:
            raise UserError(f"{folder / name} was altered (sha256 {actual[:12]}, expected {expected[:12]}): delete "
                            f"{folder} and it will be made again")  # fmt: skip
