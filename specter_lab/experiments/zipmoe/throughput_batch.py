"""zipmoe-throughput-batch: tokens/s against the number of requests decoded together (ZipMoE, throughput against batch).

A batch needs the union of its requests' experts, so reading is shared among more tokens. Budget: a quarter of the experts' BF16 bytes, for every system.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.zipmoe import timed
from specter_lab.experiments.zipmoe.setting import WITH_TRANSLATOR, inputs_of, timed_rows
from specter_lab.experiments.zipmoe.timed import LOAD, ZIP

BATCHES = (1, 4, 16)
SYSTEMS = (LOAD, "lru", ZIP)
REPEATS = 2
NEW_TOKENS = {1: 16, 4: 8, 16: 4}


def inputs(context: Context) -> dict[str, str]:
    """Every file that is read, name -> sha256."""
    return inputs_of(context, WITH_TRANSLATOR)


def run(context: Context) -> pd.DataFrame:
    """Rows: model x batch x system x repeat."""
    return timed_rows(context, measure, WITH_TRANSLATOR)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` names what is read."""
    rows = timed.sweep(
        model, seed, SYSTEMS, REPEATS, [{"batch": batch} for batch in BATCHES], lambda p: NEW_TOKENS[p["batch"]]
    )
    return [row | {"decode_tokens_per_s": round(row["batch"] / row["tpot_ms"] * 1e3, 3)} for row in rows]


def plot(rows: pd.DataFrame) -> Figure:
    """Tokens/s of the decoding steps against the batch, a panel per model."""
    return timed.curves(
        rows, SYSTEMS, "batch", "decode_tokens_per_s", xlabel="requests decoded together", ylabel="tokens/s", log=True
    )


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Smallest and largest factor over models and batches."""
    name = "zipmoe-throughput-batch"
    table = timed.ratios(rows, "decode_tokens_per_s", "batch", above=ZIP, below=LOAD)
    return [
        *timed.extremes(f"{name}/decoder", table, "batch"),
        *timed.extremes(f"{name}/encoder-decoder", table, "batch", translators=True),
    ]
