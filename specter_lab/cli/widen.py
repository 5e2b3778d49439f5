"""`specter-lab widen`."""

from __future__ import annotations

import argparse

from specter_lab.cli.command import Answer, Command, add, add_model


def arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "zoo name, or a checkpoint folder with an original's routing")
    add(
        parser,
        "out",
        files=True,
        metavar="FOLDER",
        help="where the wide checkpoint goes (28 GB for Qwen1.5-MoE's 24 layers)",
    )
    add(parser, "--to", default=None, metavar="MODEL", help="the original (default: the zoo model's own)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of nothing")


def run(options: argparse.Namespace) -> Answer:
    from specter_lab.models.widen import widen_named

    widen_named(options.model, options.out, options.to)
    return Answer({"folder": options.out})


COMMAND = Command(
    "widen", "grow a small model to its original's full size, same function",
    "specter-lab widen qwen-nano wide/                     # Qwen1.5-MoE's layers, full-size bytes, the small model's text",
    arguments, run,
)  # fmt: skip
