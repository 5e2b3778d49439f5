"""The notebooks in the order to read them, with what was found; from the registry and the recorded results."""

from __future__ import annotations

from collections import Counter

import pandas as pd
from IPython.display import Markdown

from specter_lab import paths
from specter_lab.experiments import results
from specter_lab.experiments.compare import markdown
from specter_lab.experiments.registry import EXPERIMENTS, LABS, Experiment


def contents() -> Markdown:
    """Figures and tables in their order, then the labs, each a link."""
    rows = [
        (_link(row.id), f"{row.paper}, {row.figure}", row.title, f"{row.minutes[row.tiers[0]] or '?'}", _verdicts(row))
        for row in EXPERIMENTS.values()
    ]
    rows += [(_link(row.id), "lab", row.title, str(row.minutes), "") for row in list(LABS.values())[1:]]
    columns = ["notebook", "what", "question", "minutes to compute", "recorded verdicts"]
    return Markdown(markdown(pd.DataFrame(rows, columns=columns)))


def _link(id: str) -> str:
    return f"[{id}]({id}.ipynb)"


def _verdicts(experiment: Experiment) -> str:
    """How many claims got which verdict on the first tier that has a recorded result."""
    for tier in experiment.tiers:
        if found := results.read(experiment.id, tier, paths.RECORDED):
            counts = Counter(verdict.verdict for verdict in found.verdicts)
            return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    return "not recorded yet"
