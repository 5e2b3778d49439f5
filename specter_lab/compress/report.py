"""report.json: what made a quantised checkpoint, from what, and whom calibration did not reach."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from specter_lab.compress.coverage import Coverage
from specter_lab.errors import UserError

REPORT = "report.json"
_SCHEMA = "specter-lab-quantized-1"  # tells this project's report from any other file of that name


@dataclass(frozen=True)
class Report:
    """Everything needed to trust or remake a checkpoint."""

    quantizer: str  # registry name
    bits: int  # asked for; what is stored, fallbacks and scales included, is measured when it is read
    parameters: dict  # as in the registry
    model: str
    model_digest: str
    calibration_digest: str
    versions: dict[str, str]  # package -> version
    seconds: float
    coverage: Coverage
    fallbacks: tuple[str, ...]  # one sentence each


def write_report(report: Report, folder: Path) -> None:
    """Write report.json into a checkpoint folder."""
    content = {"schema": _SCHEMA} | asdict(report) | {"coverage": report.coverage.to_json()}
    (folder / REPORT).write_text(json.dumps(content, indent=2))


def read_report(folder: Path) -> Report | None:
    """The report of a checkpoint folder; None for a download, which has none.

    Raises:
        UserError: there is one and it cannot be read.
    """
    path = folder / REPORT
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        if content.pop("schema", None) != _SCHEMA:
            return None
        content["coverage"] = Coverage.from_json(content["coverage"])
        content["fallbacks"] = tuple(content["fallbacks"])
        return Report(**content)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): delete {folder} and it will be made again") from error
