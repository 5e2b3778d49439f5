"""Where things lie. The repository is the default root; SPECTER_LAB_OUT moves everything that is written."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
ZOO = DATA / "zoo"
PROMPTS = DATA / "prompts"
CLAIMS = ROOT / "artifacts" / "claims.toml"
RECORDED = ROOT / "artifacts" / "recorded"

OUT = Path(os.environ.get("SPECTER_LAB_OUT") or ROOT / "artifacts").expanduser().absolute()
RESULTS = OUT / "results"
CACHE = OUT / "cache"
