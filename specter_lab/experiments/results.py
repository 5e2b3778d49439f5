"""Results are files, and this is the only module that writes them.

`<root>/<experiment id>/<tier>/` holds rows.csv, claims.json, figure.png (and figure.svg when small), notebook.ipynb
and, written last, provenance.json with the sha256 of all the others. A folder is a result only if every hash fits.
`artifacts/results` is yours, `artifacts/recorded` is what the project stands for.

A folder is built as `.<tier>.new` beside its place and renamed into it; the one it replaces waits as `.<tier>.old`
meanwhile. Whoever comes next, after a kill at any point, finds one of the two whole. A lock on the parent folder
keeps writers and readers apart.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import pandas as pd

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.experiments.claims import Verdict
from specter_lab.files import locked, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKER = "provenance.json"
MAX_BYTES = {"rows.csv": 1_000_000, "figure.png": 200_000, "notebook.ipynb": 500_000, "trace.json.gz": 200_000}
MAX_SVG_BYTES = 100_000
DPI_TRIED = (160, 120, 90, 72)


@dataclass(frozen=True)
class Result:
    """One whole result, as read from its folder."""

    experiment: str
    tier: str  # name of the folder: a tier, or <tier>-own
    origin: str  # "yours" or "recorded"
    folder: Path
    rows: pd.DataFrame
    verdicts: tuple[Verdict, ...]
    provenance: dict

    @property
    def figure(self) -> Path:
        return self.folder / "figure.png"


def write(
    experiment: str,
    tier: str,
    rows: pd.DataFrame,
    verdicts: Sequence[Verdict],
    figure: Figure,
    provenance: Mapping,
    extra: Mapping[str, bytes] = MappingProxyType({}),
) -> Result:
    """Write your result, atomically replacing an older one; `extra` files lie beside the rows.

    Raises:
        UserError: rows or figure are larger than a result may be.
    """
    files = {
        **extra,
        "rows.csv": rows.to_csv(index=False, lineterminator="\n").encode(),
        "claims.json": _json([asdict(verdict) for verdict in verdicts]),
        "figure.png": _png(figure),
    }
    svg = _saved(figure, format="svg", metadata={"Date": None})
    if len(svg) <= MAX_SVG_BYTES:
        files["figure.svg"] = svg
    folder = paths.RESULTS / experiment / tier
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent):
        _install(folder, files, provenance)
    return _existing(experiment, tier, paths.RESULTS)


def read(experiment: str, tier: str, root: Path) -> Result | None:
    """The result under `root` (paths.RESULTS or paths.RECORDED); None when absent, half-written, altered or outdated."""
    folder = root / experiment / tier
    if not folder.parent.is_dir():
        return None
    with locked(folder.parent):
        _settle(folder)
        files = _whole(folder)
    if files is None:
        return None
    try:
        verdicts = tuple(Verdict(**verdict) for verdict in json.loads(files["claims.json"]))
    except (TypeError, KeyError):  # written by another version of this program
        return None
    return Result(
        experiment, tier, "yours" if root == paths.RESULTS else "recorded", folder,
        pd.read_csv(io.BytesIO(files["rows.csv"])), verdicts, json.loads(files[MARKER]),
    )  # fmt: skip


def add_notebook(result: Result, notebook: Path) -> Result:
    """Put the executed notebook into a result, without this machine's paths and times.

    Raises:
        UserError: the notebook is larger than a result may be, or another run has answered another question in the meantime; the same one is as good.
    """
    content = _portable(notebook)
    with locked(result.folder.parent):
        files = _whole(result.folder)
        if files is None or not _same_question(provenance := json.loads(files[MARKER]), result.provenance):
            raise UserError(f"another run replaced {result.folder.name} of {result.experiment}: run the command again")
        files["notebook.ipynb"] = content
        files.pop(MARKER, None)
        _install(result.folder, files, provenance)
    return _existing(result.experiment, result.tier, paths.RESULTS)


def keep_lab_notebook(lab: str, name: str, notebook: Path) -> Path:
    """Keep the executed copy of a lab notebook as `<results>/<lab id>/<name>.ipynb`, in place of an older one."""
    return keep_lab_file(lab, f"{name}.ipynb", _portable(notebook))


def keep_lab_file(lab: str, name: str, content: bytes) -> Path:
    """Keep a file of a lab as `<results>/<lab id>/<name>`, in place of an older one."""
    kept = paths.RESULTS / lab / name
    write_whole(kept, content)
    return kept


def shown(path: Path) -> str:
    """A path as people are told it: from the project's folder where it lies inside."""
    return str(path.relative_to(paths.ROOT) if path.is_relative_to(paths.ROOT) else path)


def _portable(notebook: Path) -> bytes:
    """An executed notebook without this machine's paths and times, its pictures small."""
    text = notebook.read_text(encoding="utf-8").replace(str(paths.ROOT), ".")
    content = json.loads(
        text.replace("](../artifacts/recorded/", "](../../../recorded/")
    )  # as seen from a result's folder
    _shrink_pictures(content)
    for part in (content, *content["cells"]):
        part["metadata"].pop("papermill", None)
        part["metadata"].pop("execution", None)
    return json.dumps(content, indent=1, ensure_ascii=False).encode()


def record(experiment: str, tier: str) -> Result:
    """Make your result the recorded one.

    Raises:
        UserError: you have no whole result, or one without its executed notebook.
    """
    mine = read(experiment, tier, paths.RESULTS)
    if mine is None or not (mine.folder / "notebook.ipynb").exists():
        raise UserError(f"no complete {tier} result of {experiment} to record: run `make reproduce-{experiment}` first")
    files = {file.name: file.read_bytes() for file in mine.folder.iterdir() if file.name != MARKER}
    folder = paths.RECORDED / experiment / tier
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent):
        _install(folder, files, mine.provenance)
    return _existing(experiment, tier, paths.RECORDED)


def _existing(experiment: str, tier: str, root: Path) -> Result:
    result = read(experiment, tier, root)
    if result is None:
        raise UserError(f"{root / experiment / tier} was altered while it was written: run the same command again")
    return result


def _same_question(one: Mapping, other: Mapping) -> bool:
    return one == other or one.get("question", one) == other.get("question", other)


def _install(folder: Path, files: Mapping[str, bytes], provenance: Mapping) -> None:
    """Write `files` and the marker to `.new`, then rename it into place. The caller holds the lock."""
    for name, limit in MAX_BYTES.items():
        if len(files.get(name, b"")) > limit:
            raise UserError(f"{folder.parent.name}: {name} has {len(files[name]):,} bytes, {limit:,} are allowed: ask for "
                            f"fewer models at once; the rows are kept")  # fmt: skip
    new, old = _beside(folder)
    _settle(folder)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        for name, content in files.items():
            (new / name).write_bytes(content)
        hashes = {name: _sha256(content) for name, content in sorted(files.items())}
        (new / MARKER).write_bytes(_json({**provenance, "files": hashes}))
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if folder.exists():
        os.rename(folder, old)
    os.rename(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def _settle(folder: Path) -> None:
    """Finish or undo what a killed writer left behind. The caller holds the lock."""
    new, old = _beside(folder)
    if not folder.exists():
        if _whole(new) is not None:
            os.rename(new, folder)
        elif old.exists():
            os.rename(old, folder)
    shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")


def _whole(folder: Path) -> dict[str, bytes] | None:
    """Content of all files of a result, or None if one is missing or differs from its hash."""
    try:
        marker = (folder / MARKER).read_bytes()
        hashes = json.loads(marker)["files"]
        files = {name: (folder / name).read_bytes() for name in hashes}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if any(_sha256(content) != hashes[name] for name, content in files.items()):
        return None
    return {**files, MARKER: marker}


def _png(figure: Figure) -> bytes:
    """The figure at the highest resolution that stays within the limit."""
    for dpi in DPI_TRIED:
        png = _palette(_saved(figure, format="png", dpi=dpi))
        if len(png) <= MAX_BYTES["figure.png"]:
            break
    return png


def _palette(png: bytes) -> bytes:
    """The same picture in 256 colours, which plots do not miss: a third of the bytes, for a folder that lies in git."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        buffer, "png", optimize=True
    )
    return buffer.getvalue()


def _shrink_pictures(notebook: dict) -> None:
    """Store the pictures among a notebook's outputs with a palette."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            if png := output.get("data", {}).get("image/png"):
                output["data"]["image/png"] = b64encode(_palette(b64decode(png))).decode()


def _saved(figure: Figure, **how) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "specter_lab"}):
        figure.savefig(buffer, bbox_inches="tight", **how)
    return buffer.getvalue()


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
