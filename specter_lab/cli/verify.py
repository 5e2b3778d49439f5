"""`specter-lab verify`."""

from __future__ import annotations

import argparse
from pathlib import Path

from specter_lab.cli.command import Answer, Command, add, zoo_models


def arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "store", files=True, metavar="STORE", help="folder of the store")
    add(parser, "--against", words=zoo_models, files=True, default=None, metavar="MODEL",
        help="compare with this checkpoint bit for bit")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of a sentence")


def run(options: argparse.Namespace) -> Answer:
    from specter_lab.engine.store.verify import verify

    index = verify(Path(options.store), against=options.against)
    same = f", bit for bit those of {options.against}" if options.against else ""
    data = {"store": options.store, "model": index.model, "experts": len(index.experts), "against": options.against}
    return Answer(data, f"{options.store}: {len(index.experts)} experts of {index.model} are whole{same}")


COMMAND = Command(
    "verify", "check every byte of a store, naming the expert of what is damaged",
    "specter-lab verify stores/qwen-nano\n"
    "specter-lab verify stores/qwen-nano --against qwen-nano    # and compare with the checkpoint",
    arguments, run,
)  # fmt: skip
