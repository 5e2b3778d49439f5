"""Folders that are either whole or not there, whoever else is writing and whatever goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from specter_lab.errors import UserError
from specter_lab.files import is_disk_full, locked, sha256_of, whole_folder

MANIFEST = "MANIFEST.json"  # file name -> sha256 of every other file


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, building it first if it is not there, or if a file in it was lost or altered.

    `build` fills a folder beside it, which takes the final name in one step at the end; what a killed process left
    of it is thrown away by the next. A second process waits for the first and uses its result.

    Raises:
        UserError: the disk is full; nothing is left behind.
    """
    if is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(folder.name + ".lock")):
            if not is_whole(folder):
                with whole_folder(folder) as half:
                    build(half)
                    (half / MANIFEST).write_text(json.dumps(_hashes(half), indent=2))
    except Exception as error:
        if is_disk_full(error):
            raise UserError(
                f"no space left on the disk of {folder.parent} while making {folder.name}: free some, or set "
                f"SPECTER_LAB_OUT to a folder on another disk"
            ) from error
        raise
    return folder


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}


def is_whole(folder: Path) -> bool:
    """Whether `folder` is there with every file its manifest lists, unaltered."""
    try:
        return json.loads((folder / MANIFEST).read_bytes()) == _hashes(folder)
    except (OSError, ValueError):
        return False


def verify_manifest(folder: Path) -> None:
    """Check the files of a folder against its manifest; a folder without one (a download) passes.

    Raises:
        UserError: a file is missing or was altered, or the manifest is damaged.
    """
    manifest = folder / MANIFEST
    if not manifest.exists():
        return
    try:
        listed = json.loads(manifest.read_bytes())
        if not isinstance(listed, Mapping):
            raise ValueError("no list of files")
    except ValueError as error:
        raise UserError(f"{manifest} is damaged ({error}): delete {folder} and make or fetch it again") from error
    for name, expected in listed.items():
        actual = sha256_of(folder / name) if (folder / name).exists() else "missing"
        if actual != expected:
            raise UserError(f"{folder / name} was altered (sha256 {actual[:12]}, expected {str(expected)[:12]}): delete "
                            f"{folder} and make or fetch it again")  # fmt: skip
