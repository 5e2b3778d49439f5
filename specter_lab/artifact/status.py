"""`make status`: one HTML file with every claim: paper, ours, verdict, tier, and links to the run and its notebook."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import specter_lab
from specter_lab import paths
from specter_lab.artifact.appendix import TEMPLATES
from specter_lab.artifact.citation import NAME
from specter_lab.artifact.ledger import Entry, ledger
from specter_lab.artifact.papers import papers
from specter_lab.experiments.claims import NOT_REPRODUCED, NOT_REPRODUCIBLE, NOT_RUN, REPRODUCED, TREND
from specter_lab.experiments.compare import NOTHING, our_value, papers_value
from specter_lab.experiments.results import MARKER, shown
from specter_lab.files import write_whole

VERDICTS = (REPRODUCED, TREND, NOT_REPRODUCED, NOT_RUN, NOT_REPRODUCIBLE)
COLUMNS = ("paper", "claim", "paper's value", "ours", "verdict", "tier", "run")
PAGE = paths.ROOT / "artifacts" / "status.html"
FILES = {"rows": "rows.csv", "figure": "figure.png", "provenance": MARKER, "notebook": "notebook.ipynb"}


def status_page(page: Path = PAGE) -> str:
    """Content of the page that is to lie at `page`; the same recorded results give the same bytes."""
    entries = ledger()
    rows = [_row(entry, page) for entry in entries]
    counts = {
        paper.name: Counter(
            {entry.claim.id: entry.said for entry in reversed(entries) if entry.paper == paper}.values()
        )
        for paper in papers().values()
    }
    return TEMPLATES.get_template("status.html.j2").render(
        title=NAME, version=specter_lab.__version__, verdicts=VERDICTS, columns=COLUMNS, papers=counts, rows=rows
    )


def _row(entry: Entry, page: Path) -> dict:
    verdict = entry.verdict
    aside = f"; {verdict.aside}" if verdict and verdict.aside else ""
    return {
        "id": entry.claim.id,
        "paper": entry.paper.name,
        "text": entry.claim.text,
        "headline": entry.claim.headline,
        "said": papers_value(entry.claim),
        "ours": our_value(verdict) + aside,
        "sort_paper": _number(entry.claim.value, entry.claim.at_least, entry.claim.at_most),
        "sort_ours": _number(verdict.ours if verdict else None),
        "verdict": entry.said,
        "rank": VERDICTS.index(entry.said),
        "why": entry.why,
        "tier": entry.result.tier if entry.result else NOTHING,
        "links": _links(entry, page),
    }


def _number(*values: float | None) -> str:
    """The first number there is, as JavaScript reads it; empty if there is none."""
    return next((repr(float(value)) for value in values if value is not None), "")


def _links(entry: Entry, page: Path) -> list[dict[str, str]]:
    """Files of the run, relative to the page, and the notebook to run it again."""
    links = []
    if entry.result:
        present = {name: entry.result.folder / file for name, file in FILES.items()}
        links = [{"name": name, "href": _href(file, page)} for name, file in present.items() if file.exists()]
    elif entry.experiment:
        links = [{"name": "notebook", "href": _href(paths.ROOT / "notebooks" / f"{entry.experiment.id}.ipynb", page)}]
    return links


def _href(file: Path, page: Path) -> str:
    return Path(os.path.relpath(file, page.parent)).as_posix()


def main() -> int:
    """Write the page. Returns the exit status."""
    page = paths.OUT / PAGE.name
    write_whole(page, status_page(page).encode())
    print(f"every claim, its verdict and its run: {shown(page)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
