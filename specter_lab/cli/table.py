"""`specter-lab table`."""

from __future__ import annotations

import argparse

from specter_lab.cli.command import Answer, Command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--readme", action="store_true", help="write it into README.md instead of printing it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")


def run(options: argparse.Namespace) -> Answer:
    from specter_lab.experiments import compare

    headline = compare.headline_table()
    if options.readme:
        compare.update_readme()
    return Answer(headline.to_dict("records"), "" if options.readme else compare.markdown(headline))


COMMAND = Command("table", "the headline claims as a Markdown table", "specter-lab table", arguments, run)
