"""Lists of checksums in the form of sha256sum: `<sha256>  <path>`, one file a line."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from specter_lab.errors import UserError
from specter_lab.files import sha256_of

NAME = "SHA256SUMS"


def sums_of(files: Mapping[str, bytes]) -> str:
    """The list for files given as path -> content, sorted by path."""
    return "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(files.items()))


def listed(sums: Path) -> dict[str, str]:
    """Path -> sha256 of a list.

    Raises:
        UserError: a line is none.
    """
    entries = {}
    for line in sums.read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or not name:
            raise UserError(f"{sums.name} is damaged at '{line[:40]}': take it from the archive again")
        entries[name] = digest
    return entries


def altered(sums: Path) -> list[str]:
    """Files of a list that are missing or differ, with what is wrong; paths are relative to the list's folder."""
    wrong = []
    for name, digest in listed(sums).items():
        file = sums.parent / name
        if not file.is_file():
            wrong.append(f"{name} is missing")
        elif sha256_of(file) != digest:
            wrong.append(f"{name} is altered")
    return wrong
