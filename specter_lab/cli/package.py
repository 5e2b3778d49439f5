"""`specter-lab package`."""

from __future__ import annotations

import argparse

from specter_lab.cli.command import Answer, Command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a sentence")


def run(options: argparse.Namespace) -> Answer:
    from specter_lab.artifact.package import package, sentence

    archive = package()
    return Answer({"archive": str(archive), "bytes": archive.stat().st_size}, sentence(archive))


COMMAND = Command(
    "package", "one archive of code, data and every recorded result",
    "specter-lab package                                   # the same as `make package`; `make verify` checks it",
    arguments, run,
    description="Code, data, recorded results, the status page, SHA256SUMS and an RO-Crate of every run, in one archive: the same "
                "bytes for the same commit.",
)  # fmt: skip
