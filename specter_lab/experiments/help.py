"""`make help`: the targets written in the Makefile, and one row per experiment. Standard library only."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from specter_lab.experiments.registry import EXPERIMENTS, LABS, Experiment

MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"
USAGE = "make TARGET [TIER=cpu|gpu|paper] [SEED=0] [FRESH=1] [MODELS='qwen-nano path/to/folder org/name'] [RUNNER=ray]"


def house_targets() -> list[tuple[str, str]]:
    """(target, what it does) for every rule of the Makefile that carries a `## comment`."""
    return re.findall(r"^([\w-]+):.*?## (.+)$", MAKEFILE.read_text(), flags=re.MULTILINE)


def experiment_targets(row: Experiment) -> list[str]:
    """The make targets of an experiment: its id and its aliases."""
    return [f"reproduce-{name}" for name in (row.id, *row.aliases)]


def render() -> str:
    """One table: target, tier, minutes (once installed), what it does."""
    table = [("TARGET", "TIER", "MINUTES", "WHAT IT DOES")]
    table += [(target, "", "", what) for target, what in house_targets()]
    for row in EXPERIMENTS.values():
        target, *aliases = experiment_targets(row)
        for tier in row.tiers:
            what = f"{row.paper}, {row.figure}: {row.title}" if tier == row.tiers[0] else "the same, TIER=" + tier
            table.append((target, tier, str(row.minutes[tier] or "?"), what))
        table += [(alias, "", "", f"short for {target}") for alias in aliases]
    table += [(row.id, "", str(row.minutes), row.title) for row in LABS.values()]
    width = max(len(line[0]) for line in table)
    lines = [f"  {target:<{width}}  {tier:<5}  {minutes:>7}  {what}" for target, tier, minutes, what in table]
    return "\n".join([USAGE, "", *lines, "", "MINUTES are counted once installed; ? = never timed."])


if __name__ == "__main__":
    try:
        print(render(), flush=True)
    except BrokenPipeError:  # `make help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
