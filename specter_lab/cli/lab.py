"""`specter-lab lab`."""

from __future__ import annotations

import argparse

from specter_lab.cli.command import Answer, Command, add
from specter_lab.errors import UserError


def _ids() -> list[str]:
    from specter_lab.experiments.registry import LABS

    return list(LABS)


def arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "id", words=_ids, metavar="ID", help=", ".join(_ids()))
    parser.add_argument("parameters", nargs="*", metavar="NAME=VALUE", help="of the notebook")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> Answer:
    from specter_lab.experiments.runner import run_lab

    for word in options.parameters:
        if "=" not in word:
            raise UserError(f"'{word}' is no parameter: write NAME=VALUE")
    given = {name.lower(): value for name, value in (word.split("=", 1) for word in options.parameters)}
    executed = str(run_lab(options.id, given))
    return Answer({"notebook": executed}, f"executed: {executed}")


COMMAND = Command(
    "lab", "execute a lab notebook headless",
    "specter-lab lab lab-your-model MODEL=path/to/checkpoint QUANTIZER=gptq-int4\n"
    "specter-lab lab lab-what-if PROFILE=rtx4090 SLOTS=16",
    arguments, run,
)  # fmt: skip
