"""What of the project is here and what is missing. Standard library only, so that it runs where little is installed."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from specter_lab import paths

WANTED_PYTHON = (3, 11)
LOCK = paths.ROOT / "requirements.lock"
MANIFEST = paths.DATA / "MANIFEST.sha256"
AUTOAWQ = paths.ROOT / ".venv-autoawq" / "bin" / "python"
NAMED = ("torch", "transformers", "numpy")  # packages whose versions are worth reading


@dataclass(frozen=True)
class Part:
    """One part of the project's installation."""

    name: str
    found: str  # what is there, for people; empty: nothing
    missing: str = ""  # what is not, and how to get it; empty: nothing
    needed: bool = True  # nothing works without it


def parts() -> list[Part]:
    """Every part, needed ones first."""
    return [_python(), _packages(), _data(), _output(), _autoawq(), _ray(), _cuda()]


def works(found: list[Part]) -> bool:
    """Whether nothing that is needed is missing."""
    return not any(part.needed and part.missing for part in found)


def _python() -> Part:
    wanted, running = (".".join(map(str, v)) for v in (WANTED_PYTHON, sys.version_info[:3]))
    right = sys.version_info[:2] == WANTED_PYTHON
    return Part("Python", running, "" if right else f"Python {wanted}: install it and run `make setup`")


def _packages() -> Part:
    """The lock file against what is installed; another version is told, but no reason to stop."""
    pins = dict(line.split("==") for line in LOCK.read_text(encoding="utf-8").split())
    installed = {name: package_version(name) for name in pins}
    absent = sorted((name for name, there in installed.items() if there is None), key=lambda name: name not in NAMED)
    other = [f"{name} {there} (locked: {pins[name]})" for name, there in installed.items()
             if there is not None and there.split("+")[0] != pins[name]]  # fmt: skip
    found = [f"{len(pins) - len(absent)} of {len(pins)} of the lock file"]
    found += [f"{name} {installed[name]}" for name in NAMED if installed.get(name)]
    if other:
        found.append("other versions: " + _some(other))
    missing = f"{_some(absent)}: `make setup` installs everything" if absent else ""
    return Part("packages", ", ".join(found), missing)


def _data() -> Part:
    names = [line.split(maxsplit=1)[1] for line in MANIFEST.read_text(encoding="utf-8").splitlines() if line.strip()]
    absent = [name for name in names if not (paths.DATA / name).exists()]
    missing = f"{_some(absent)}: `git checkout -- data` brings them back" if absent else ""
    return Part("models and texts", f"{len(names) - len(absent)} of {len(names)} files in data/", missing)


def _output() -> Part:
    folder = paths.OUT
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if os.access(there, os.W_OK):
        return Part("output folder", str(folder))
    return Part("output folder", "", f"{folder} cannot be written: set SPECTER_LAB_OUT to a folder that can")


def _autoawq() -> Part:
    if AUTOAWQ.exists():
        return Part("autoawq", "environment of its own", needed=False)
    return Part("autoawq", "", "the second AWQ engine: `make setup-autoawq`", needed=False)


def _ray() -> Part:
    if there := package_version("ray"):
        return Part("Ray", there, needed=False)
    return Part("Ray", "", "for sweeps over many machines: `make setup-ray`", needed=False)


def _cuda() -> Part:
    without = "tier gpu and measured GPU times"
    if find_spec("torch") is None:
        return Part("CUDA", "", f"{without}: install torch first", needed=False)
    import torch

    if torch.cuda.is_available():
        gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return Part("CUDA", f"{torch.version.cuda}, {gpus}", needed=False)
    if torch.version.cuda is None:
        return Part("CUDA", "", f"{without}: this torch is a build without CUDA", needed=False)
    return Part("CUDA", "", f"{without}: torch {torch.__version__} sees no GPU or no driver", needed=False)


def package_version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _some(names: list[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
