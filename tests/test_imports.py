"""The one way through the house: models -> compress -> measure -> plan -> engine -> serve -> experiments -> artifact."""

import ast

import pytest

from specter_lab.artifact.house import ORDER
from specter_lab.paths import ROOT

FOUNDATION = {"compiled", "errors", "paths", "files"}  # anyone may import these; they import only each other
ENTRANCES = {"cli"}  # these may import anything; nobody imports them
ALONE = {"setup_env"}  # runs before anything is installed

PACKAGE = ROOT / "specter_lab"
FILES = sorted(PACKAGE.rglob("*.py"))


def imported_parts(file):
    """First component below specter_lab of everything a file imports, lazily or not: `specter_lab.a.b` -> `a`."""
    parts = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} is a relative import; the order can't be read from it"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts |= {name.split(".")[1] for name in names if name.startswith("specter_lab.")}
    return parts - {"__version__"}


def allowed(part):
    """What the files of one part (a package, or a root file) may import."""
    if part in ALONE:
        return set()
    if part in FOUNDATION:
        return FOUNDATION - {part}
    if part in ORDER:
        return FOUNDATION | set(ORDER[: ORDER.index(part) + 1])
    if part in ENTRANCES | {"__init__"}:
        return FOUNDATION | set(ORDER) | {part}
    raise AssertionError(f"specter_lab/{part} has no place in the order: name it in tests/test_imports.py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_file_imports_only_to_the_left(file):
    part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert imported_parts(file) <= allowed(part)


def test_a_wrong_import_would_be_found(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from specter_lab.experiments import jobs\n    import specter_lab.compress.rtn\n")
    assert imported_parts(bad) == {"experiments", "compress"}
    assert not imported_parts(bad) <= allowed("measure")


def test_help_needs_the_standard_library_only():
    """`make help` works before set-up: no third-party import on its way."""
    import sys

    on_the_way = [PACKAGE / "errors.py", PACKAGE / "__init__.py", PACKAGE / "setup_env.py"]
    on_the_way += [PACKAGE / "experiments" / name for name in ("__init__.py", "registry.py", "help.py")]
    for file in on_the_way:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in sys.stdlib_module_names | {"specter_lab"}, f"{file} imports {name}"
