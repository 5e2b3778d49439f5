"""zipmoe-latency-length: time of a whole request against the length of its output (ZipMoE, latency against length).

Prompt included; pools are filled by a few tokens first, as in a running service. Budget: a quarter of the experts' BF16 bytes.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.zipmoe import timed
from specter_lab.experiments.zipmoe.setting import inputs_of, timed_rows
from specter_lab.experiments.zipmoe.timed import LOAD, ZIP

LENGTHS = (8, 24, 72)  # new tokens
SYSTEMS = (LOAD, "lru", ZIP)
REPEATS = 2
inputs = inputs_of


def run(context: Context) -> pd.DataFrame:
    """Rows: model x length x system x repeat."""
    return timed_rows(context, measure)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` names what is read."""
    return timed.sweep(
        model, seed, SYSTEMS, REPEATS, [{"new_tokens": length} for length in LENGTHS], lambda p: p["new_tokens"]
    )


def plot(rows: pd.DataFrame) -> Figure:
    """Seconds of a request against new tokens, a panel per model."""
    return timed.curves(rows, SYSTEMS, "new_tokens", "total_s", xlabel="new tokens", ylabel="seconds, prompt included")


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Smallest and largest factor over models and lengths."""
    name = "zipmoe-latency-length"
    table = timed.ratios(rows, "total_s", "new_tokens")
    return [
        *timed.extremes(f"{name}/decoder", table, "new_tokens"),
        *timed.no_encoder_decoder(f"{name}/encoder-decoder"),
    ]
