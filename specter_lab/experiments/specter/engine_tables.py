"""What figure, claims and notebook of specter-engine read off its rows."""

from __future__ import annotations

import pandas as pd

from specter_lab.experiments.specter.engine_runs import ALL_SETS, BASELINES, RESIDENT, SYSTEMS

CELL = ["model", "budget", "prompt_set"]
CLOSE = 0.10  # relative error of a simulated time that counts as right


def medians(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Median over repeats of a column: cells (model, budget, prompt set) by system; empty where a system was refused."""
    systems = rows[rows["by"] == "system"]
    return systems.groupby([*CELL, "item"])[column].median().unstack("item").reindex(columns=[*SYSTEMS])


def fastest_systems(rows: pd.DataFrame) -> pd.Series:
    """This engine's fastest offloading system, all prompt sets together: its name by (model, budget)."""
    ms = medians(rows, "measured_ms_per_token").xs(ALL_SETS, level="prompt_set")
    return ms.drop(columns=[RESIDENT, *BASELINES]).dropna(how="all").idxmin(axis=1)


def limits(rows: pd.DataFrame) -> pd.DataFrame:
    """Per setting of the offloading systems, all prompt sets together: ms per token, what limits it, and the ratio."""
    ms, link, busy, simulated = (
        medians(rows, column).xs(ALL_SETS, level="prompt_set").drop(columns=RESIDENT).stack().dropna()
        for column in ("measured_ms_per_token", "floor_link_ms_per_token", "link_busy_share", "simulated_ms_per_token")
    )
    resident = medians(rows, "measured_ms_per_token").xs((ALL_SETS, "high"), level=("prompt_set", "budget"))[RESIDENT]
    compute = ms.index.get_level_values("model").map(resident)
    table = pd.DataFrame(
        {"measured_ms": ms, "link_ms": link, "compute_ms": compute, "link_busy_share": busy, "simulated_ms": simulated}
    )
    table["over_floor"] = table["measured_ms"] / table[["link_ms", "compute_ms"]].max(axis=1)
    table["simulator_error"] = table["simulated_ms"] / table["measured_ms"] - 1
    return table.reset_index(names=["model", "budget", "item"])
