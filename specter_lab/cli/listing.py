"""`specter-lab list`."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from specter_lab.cli.command import Answer, Command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> Answer:
    from specter_lab.experiments.help import render
    from specter_lab.experiments.registry import EXPERIMENTS, LABS

    data = {
        "experiments": [asdict(row) for row in EXPERIMENTS.values()],
        "labs": [asdict(row) for row in LABS.values()],
    }
    return Answer(data, render())


COMMAND = Command(
    "list", "every experiment, with its tiers and minutes", "specter-lab list\nspecter-lab list --json | jq '.experiments[].id'",
    arguments, run,
)  # fmt: skip
