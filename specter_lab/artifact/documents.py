"""`make documents`: every document of the project that is generated, and whether one is out of date."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from specter_lab import paths
from specter_lab.artifact.appendix import appendix
from specter_lab.artifact.citation import citation_cff, zenodo_json
from specter_lab.artifact.house import with_map
from specter_lab.artifact.papers import papers
from specter_lab.files import write_whole

APPENDICES = paths.ROOT / "artifacts" / "appendix"


def documents() -> dict[Path, Callable[[], str]]:
    """Path -> what makes its content, for all of them. README.md has a table of its own (`make readme`)."""
    return {
        paths.ROOT / "CITATION.cff": citation_cff,
        paths.ROOT / ".zenodo.json": zenodo_json,
        paths.ROOT / "CONTRIBUTING.md": with_map,
        **{APPENDICES / f"{paper.prefix}.md": partial(appendix, paper) for paper in papers().values()},
    }


def stale() -> list[Path]:
    """The documents that are not what would be made now."""
    made = {path: make() for path, make in documents().items()}
    return [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def main() -> int:
    """Write what is stale, and say so. Returns the exit status."""
    for path in stale():
        write_whole(path, documents()[path]().encode())
        print(f"written: {path.relative_to(paths.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
