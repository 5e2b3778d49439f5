"""Files and folders that are whole or not there, whoever else is writing and whatever goes wrong; locks and hashes.

Standard library only: the quantiser jobs import this in environments of their own.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specter_lab.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_FOLDER = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
_GONE = (errno.ENOENT, errno.ESTALE)
_ELSEWHERE = "set SPECTER_LAB_OUT to a folder"


def sha256_of(path: Path) -> str:
    """sha256 of a file, hexadecimal. Raises UserError when there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: restore it (`git checkout` for a file of this project)") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder, or on a file (made if missing); it falls when its holder ends, however."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, renamed to it when the block ends well, removed otherwise; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield half
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, or leave what was there."""
    with whole_file(path) as half:
        half.write_bytes(content)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path`, renamed to it when the block ends well, removed otherwise.

    One writer at a time: what a killed one left is thrown away, and so is what stood at `path`.
    """
    half = path.with_name(f"{path.name}.partial")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    try:
        yield half
        shutil.rmtree(path, ignore_errors=True)
        half.rename(path)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def is_disk_full(error: BaseException) -> bool:
    """Python says so by errno, the safetensors writer in its message, NumPy's `tofile` by a short write."""
    short_write = isinstance(error, OSError) and error.errno is None and "requested and" in str(error)
    return _code(error) in _FULL or short_write


def disk_problem(error: BaseException) -> str | None:
    """What disk, folder or permission is at fault and the way out, in one sentence; None for any other error."""
    code, name = _code(error), getattr(error, "filename", None)
    if is_disk_full(error):
        written = getattr(error, "filename2", None) or name  # a copy names its source first
        where = f" (writing {written})" if written else ""
        return (f"the disk is full{where}: free some space (artifacts/cache/quantized can always be made again), or "
                f"{_ELSEWHERE} on another disk; temporary files go to {_temporary()}, which TMPDIR moves; then run "
                f"the same command again, what is finished is kept")  # fmt: skip
    if name is None or code is None:
        return None
    what = f"{name}: {os.strerror(code)}"
    if code in _FORBIDDEN:
        return f"{what}: give yourself access to it, or {_ELSEWHERE} that you may write to"
    if code in _NO_FOLDER:
        return f"{what}: rename what stands there, or {_ELSEWHERE}"
    if code in _GONE:
        return f"{what}: if something removed it while this command ran, run the same command again"
    return f"{what}: put that right, or {_ELSEWHERE} on another disk"


def _code(error: BaseException) -> int | None:
    told = re.search(r"\(os error (\d+)\)", str(error))
    return int(told[1]) if told else getattr(error, "errno", None)


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # nowhere at all
        return "no folder"
