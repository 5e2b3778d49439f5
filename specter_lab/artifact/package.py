"""`make package`: everything an evaluator needs in one archive, the same bytes for the same commit.

It holds the files of the commit, and what is made from them: the status page, the RO-Crate and SHA256SUMS. Nothing of
yours (a store, a report), no cache and no environment is in it.
"""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import specter_lab
from specter_lab import paths
from specter_lab.artifact import sums
from specter_lab.artifact.citation import NAME
from specter_lab.artifact.crate import METADATA, crate_json
from specter_lab.artifact.documents import stale
from specter_lab.artifact.status import PAGE, status_page
from specter_lab.errors import UserError
from specter_lab.experiments.results import shown
from specter_lab.files import write_whole

FOLDER = f"{NAME}-{specter_lab.__version__}"  # what the archive unpacks to
COMPRESSION = 6
NO_CHECKOUT = "this is no git checkout (or git is missing): a package is made of a commit, so clone first"


def package(out: Path = paths.OUT / "package") -> Path:
    """Write the archive into `out`.

    Raises:
        UserError: this is no git checkout, it differs from its commit, or a generated document is out of date.
    """
    if Path(_git("rev-parse", "--show-toplevel").strip()).resolve() != paths.ROOT:
        raise UserError(NO_CHECKOUT)
    if changes := _git("status", "--porcelain", "--untracked-files=no"):
        raise UserError(f"{len(changes.splitlines())} files differ from the commit ({changes.split()[1]}): a package is made "
                        f"of a commit, so commit or stash them first")  # fmt: skip
    if old := stale():
        raise UserError(f"{shown(old[0])} is out of date: run `make documents` and commit")
    date = datetime.fromisoformat(_git("log", "-1", "--format=%cI").strip()).astimezone(UTC)
    names = _git("ls-files", "-z").rstrip("\0").split("\0")
    files = {name: (paths.ROOT / name).read_bytes() for name in names}
    files[PAGE.relative_to(paths.ROOT).as_posix()] = status_page().encode()
    files[METADATA] = crate_json(date).encode()
    files[sums.NAME] = sums.sums_of(files).encode()
    executable = {name for name in names if (paths.ROOT / name).stat().st_mode & 0o100}
    archive = out / f"{FOLDER}.tar.gz"
    write_whole(archive, packed(files, executable, date))
    return archive


def packed(files: dict[str, bytes], executable: set[str], date: datetime) -> bytes:
    """A gzipped tar archive of path -> content: sorted, owned by nobody, dated `date` throughout."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(f"{FOLDER}/{name}")
            member.size = len(files[name])
            member.mtime = int(date.timestamp())
            member.mode = 0o755 if name in executable else 0o644
            archive.addfile(member, io.BytesIO(files[name]))
    return gzip.compress(tar.getvalue(), COMPRESSION, mtime=0)


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=paths.ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(NO_CHECKOUT) from error
    return done.stdout


def sentence(archive: Path) -> str:
    """Where the archive is, and what to do with it."""
    return f"{shown(archive)}: {archive.stat().st_size / 1e6:.1f} MB; unpack it and run `make verify`"


def main() -> int:
    """Make the package and say where it is. Returns the exit status."""
    try:
        archive = package()
    except UserError as error:
        print(f"package: {error}", file=sys.stderr)
        return 2
    print(sentence(archive))
    return 0


if __name__ == "__main__":
    sys.exit(main())
