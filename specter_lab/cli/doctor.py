"""`specter-lab doctor`."""

from __future__ import annotations

import argparse
import json
import sys

from specter_lab.cli.command import EXIT_MISSING, Answer, Command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a report")


def run(options: argparse.Namespace) -> Answer:
    from specter_lab.plan.doctor import examine

    report = examine(on_step=lambda text: print(f"{text} ...", file=sys.stderr))
    return Answer(json.loads(report.to_json()), report.to_text(), 0 if report.works else EXIT_MISSING)


COMMAND = Command(
    "doctor", "what is installed, how fast this machine is; writes its profile",
    "specter-lab doctor                                    # half a minute\n"
    "specter-lab simulate qwen-nano --profile this-machine # what the simulator makes of it",
    arguments, run,
    description="Looks at the installation, measures processor, memory, disk, link and GPU, and writes the hardware profile "
                "'this-machine', which `simulate`, `measure` and the notebooks take.",
)  # fmt: skip
