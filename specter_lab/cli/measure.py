"""`specter-lab measure`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable

from specter_lab.cli.command import Answer, Command, add, add_model, add_seed, number, profiles, quantizers, whole

OPTIONS = ("quantizer", "prompts", "requests", "max_tokens", "depth", "profile", "memory_gb", "seed", "device")


def arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add(parser, "--quantizer", words=quantizers, files=True, default="gptq-int4", metavar="NAME",
        help="of the draft's experts, by name, or a quantised checkpoint (default: gptq-int4)")  # fmt: skip
    add(parser, "--prompts", words=lambda: names()["prompt sets"], files=True, nargs="+", default=None, metavar="FILE",
        help=".txt or .jsonl files, or prompt sets by name (default: all sets)")  # fmt: skip
    add(parser, "--requests", type=whole, default=20, metavar="N", help="prompts of each (default: 20)")
    add(parser, "--max-tokens", type=whole, metavar="N", help="cut prompts to so many tokens (default: all)")
    add(parser, "--depth", type=whole, default=16, metavar="K", help="largest K (default: 16)")
    add(parser, "--profile", words=profiles, default=None, metavar="NAME",
        help="machine of the prediction, by name (default: the paper's A100)")  # fmt: skip
    add(parser, "--memory-gb", type=number, metavar="GB", help="its GPU memory (default: all it has)")
    add_seed(parser)
    add(parser, "--device", default=None, metavar="DEVICE",
        help="where to measure (default: the GPU if there is one, but the CPU for shipped models)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> Answer:
    from specter_lab.experiments.lab.your_model import measure_model

    given = {name: getattr(options, name) for name in OPTIONS if getattr(options, name) is not None}
    report = measure_model(options.model, on_step=lambda text: print(f"{text} ...", file=sys.stderr), **given)
    return Answer(json.loads(report.to_json()), report.to_text())


def names() -> dict[str, Iterable[str]]:
    """Every name an option takes."""
    from specter_lab.measure.hub_prompts import HUB_SETS
    from specter_lab.measure.prompts import PROMPT_SETS

    return {"quantisers": quantizers(), "prompt sets": PROMPT_SETS, "prompt sets of the model hub": HUB_SETS,
            "profiles": profiles()}  # fmt: skip


COMMAND = Command(
    "measure", "routing, acceptance and predicted K* of a model of your own",
    "specter-lab measure qwen-nano --requests 5            # half a minute on two cores\n"
    "specter-lab measure path/to/checkpoint --quantizer gptq-int4 --prompts mine.txt\n"
    "specter-lab measure org/name --profile rtx4090 --memory-gb 24 --json > report.json",
    arguments, run, names=names,
)  # fmt: skip
