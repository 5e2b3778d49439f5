"""The map of the house in CONTRIBUTING.md: one line per module, from its docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from specter_lab import paths
from specter_lab.errors import UserError

GUIDE = paths.ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- map:begin -->", "<!-- map:end -->"
PACKAGE = paths.ROOT / "specter_lab"
# A package imports only from those to its left (tests/test_imports.py); entrances like the command line come after.
ORDER = ("models", "compress", "measure", "plan", "engine", "serve", "experiments", "artifact")
SENTENCE_END = re.compile(r"(?<=[\w)]{2}\.) ")


def modules() -> list[Path]:
    """Every module of a package that has anything to say, in the order of the packages; root files first."""
    files = [
        file
        for file in PACKAGE.rglob("*.py")
        if (file.parent / "__init__.py").exists()
        and file.name != "__main__.py"
        and file.read_text(encoding="utf-8").strip()
    ]
    return sorted(files, key=lambda file: (_rank(file.relative_to(PACKAGE)), str(file)))


def _rank(inside: Path) -> int:
    """Where a file's part of the house comes in the map."""
    part = inside.parts[0]
    return -1 if len(inside.parts) == 1 else ORDER.index(part) if part in ORDER else len(ORDER)


def summary(file: Path) -> str:
    """The first sentence of a module's docstring.

    Raises:
        UserError: it has none.
    """
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not docstring:
        raise UserError(
            f"{file.relative_to(paths.ROOT)} says nothing about itself: begin it with a docstring of one line"
        )
    return SENTENCE_END.split(docstring.split("\n\n")[0].replace("\n", " "))[0]


def house_map() -> str:
    """The map as Markdown: a heading per package, a line per module."""
    lines, part = [], ""
    for file in modules():
        inside = file.relative_to(PACKAGE)
        here = inside.parts[0] if len(inside.parts) > 1 else "specter_lab"
        if here != part:
            part = here
            lines += ["", f"**{part}**", ""]
        name = str(inside.relative_to(here) if len(inside.parts) > 1 else inside)
        lines.append(f"- `{name}`: {summary(file)}")
    return "\n".join(lines).strip()


def with_map() -> str:
    """CONTRIBUTING.md with the map as it is now.

    Raises:
        UserError: the guide is missing or has lost its markers.
    """
    text = GUIDE.read_text(encoding="utf-8") if GUIDE.exists() else ""
    if BEGIN not in text or END not in text:
        raise UserError(f"{GUIDE.name} has no lines '{BEGIN}' and '{END}': put them back where the map belongs")
    return f"{text.split(BEGIN)[0]}{BEGIN}\n{house_map()}\n{END}{text.split(END)[1]}"
