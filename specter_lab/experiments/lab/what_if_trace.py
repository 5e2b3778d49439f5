"""The run behind an answer of lab-what-if, piece by piece: a Chrome trace of all of it, and one round as a figure.

recorded = record(question)
recorded.trace                      # artifacts/results/lab-what-if/<question>.json.gz; opens in Perfetto (ui.perfetto.dev)
timeline(recorded)                  # a usual round, once the first request has filled the slots
"""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from specter_lab.experiments import results
from specter_lab.experiments.lab import what_if
from specter_lab.experiments.lab.what_if import Question
from specter_lab.experiments.specter.timeline import round_rows, shown_round
from specter_lab.experiments.specter.timeline_figure import draw
from specter_lab.plan.policies import find_policy
from specter_lab.plan.simulate import Simulation
from specter_lab.plan.streams import chrome_trace

LAB = "lab-what-if"


@dataclass(frozen=True)
class Recorded:
    """One run with all its work, and where its trace lies."""

    question: Question
    simulation: Simulation
    trace: Path


def record(question: Question) -> Recorded:
    """Simulate a question again, keep every piece of work, and write the Chrome trace beside the lab's results.

    Raises:
        UserError: as `what_if.simulated`.
    """
    found = what_if.simulated(question, record=True)
    text = json.dumps(chrome_trace(found.spans), separators=(",", ":"))
    content = gzip.compress(text.encode(), compresslevel=4, mtime=0)
    return Recorded(question, found, results.keep_lab_file(LAB, f"{name_of(question)}.json.gz", content))


def name_of(question: Question) -> str:
    """A file name that says what was asked; equal questions have equal names."""
    depth = f"K{question.depth}" if question.control == what_if.FIXED else question.control
    words = (
        question.model,
        question.policy,
        question.profile,
        f"{question.slots}-slots",
        depth,
        f"seed{question.seed}",
    )
    return re.sub(r"[^\w.]+", "-", "-".join(words))


def timeline(recorded: Recorded) -> Figure:
    """One usual round on its streams."""
    question = recorded.question
    mode = f"{find_policy(question.policy).title}, {question.profile}"
    rows = pd.DataFrame(round_rows(recorded.simulation, shown_round(recorded.simulation)))
    return draw(rows.assign(model=question.model, mode=mode))
