"""zipmoe-latency-length: time of a whole request against the length of its output (ZipMoE, latency against length).

Prompt included; pools are filled by a few tokens first, as in a running service. Budget: a quarter of the experts' BF16 bytes.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.zipmoe import timed
from specter_lab.experiments.zipmoe.sentences import SOURCE_TOKENS
from specter_lab.experiments.zipmoe.setting import WITH_TRANSLATOR, inputs_of, timed_rows
from specter_lab.experiments.zipmoe.timed import LOAD, ZIP
from specter_lab.models.load import TRANSLATORS

LENGTHS = (8, 24, 72)  # new tokens
SYSTEMS = (LOAD, "lru", ZIP)
REPEATS = 2


def inputs(context: Context) -> dict[str, str]:
    """Every file that is read, name -> sha256."""
    return inputs_of(context, WITH_TRANSLATOR)


def run(context: Context) -> pd.DataFrame:
    """Rows: model x length x system x repeat."""
    return timed_rows(context, measure, WITH_TRANSLATOR)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` names what is read."""
    lengths = [n for n in LENGTHS if model not in TRANSLATORS or n <= SOURCE_TOKENS]  # no longer than a translation
    return timed.sweep(model, seed, SYSTEMS, REPEATS, [{"new_tokens": n} for n in lengths], lambda p: p["new_tokens"])


def plot(rows: pd.DataFrame) -> Figure:
    """Seconds of a request against new tokens, a panel per model."""
    return timed.curves(rows, SYSTEMS, "new_tokens", "total_s", xlabel="new tokens", ylabel="seconds, prompt included")


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Smallest and largest factor over models and lengths."""
    name = "zipmoe-latency-length"
    table = timed.ratios(rows, "total_s", "new_tokens")
    return [
        *timed.extremes(f"{name}/decoder", table, "new_tokens"),
        *timed.extremes(f"{name}/encoder-decoder", table, "new_tokens", translators=True),
    ]
