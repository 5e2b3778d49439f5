"""`specter-lab record`."""

from __future__ import annotations

import argparse

from specter_lab.cli.command import Answer, Command, add, add_tier, experiments
from specter_lab.cli.reproduce import chosen


def arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "id", words=lambda: [*experiments(), "all"], metavar="ID", help="experiment id or alias, or 'all'")
    add_tier(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> Answer:
    ids = chosen(options.id, options.tier)
    from specter_lab.experiments import results

    folders = {}
    for name in ids:
        folders[name] = results.shown(results.record(name, options.tier).folder)
        print(f"recorded {name}, {options.tier} tier")
    return Answer(folders)


COMMAND = Command(
    "record", "make your result the recorded one (artifacts/recorded)", "specter-lab record table1", arguments, run,
)  # fmt: skip
