"""`make docs`: the API reference, a page per module, from the docstrings."""

from __future__ import annotations

import shutil
import sys
from importlib import import_module
from pathlib import Path

import pdoc
import pdoc.render
from tqdm.auto import tqdm

from specter_lab import paths
from specter_lab.artifact.citation import NAME
from specter_lab.artifact.house import PACKAGE, modules
from specter_lab.experiments.results import shown
from specter_lab.files import whole_folder

OUT = paths.OUT / "docs"


def module_names() -> list[str]:
    """The dotted names of all modules that have anything in them."""
    parts = [file.relative_to(PACKAGE.parent).with_suffix("").parts for file in modules()]
    return [".".join(part for part in name if part != "__init__") for name in parts]


def importable(names: list[str]) -> dict[str, str]:
    """Name -> why it cannot be imported here (a package of an environment of its own); empty: it can."""
    found = {}
    for name in tqdm(names, desc="reading modules", leave=False, disable=None):
        try:
            import_module(name)
            found[name] = ""
        except ImportError as error:
            found[name] = str(error)
    return found


def write_reference(out: Path = OUT) -> dict[str, str]:
    """Write the reference into the folder `out`, in place of an older one.

    Returns:
        The modules left out, and why.
    """
    found = importable(module_names())
    left_out = {name: why for name, why in found.items() if why}
    pdoc.render.configure(docformat="google", show_source=False, footer_text=NAME)
    with whole_folder(out) as folder:
        pdoc.pdoc("specter_lab", *(f"!{name}$" for name in left_out), output_directory=folder)
        shutil.copyfile(folder / "specter_lab.html", folder / "index.html")
    return left_out


def main() -> int:
    """Write the reference and say where. Returns the exit status."""
    for name, why in write_reference().items():
        print(f"left out: {name} ({why})")
    print(f"{shown(OUT)}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
