"""`specter-lab simulate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from specter_lab.cli.command import Answer, Command, add, add_seed, amount, policies, profiles, whole, zoo_models
from specter_lab.errors import UserError

if TYPE_CHECKING:
    from specter_lab.experiments.lab import what_if


def arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "model", words=zoo_models, metavar="MODEL", help="zoo name; bytes and layers are its original's")
    add(parser, "--policy", words=policies, nargs="+", default=["specter"], metavar="NAME",
        help="one or more, side by side (default: specter)")  # fmt: skip
    add(parser, "--profile", words=profiles, default=None, metavar="NAME", help="machine (default: the paper's A100)")
    add(parser, "--slots", type=whole, metavar="N", help="expert slots per layer (default: the paper's)")
    add(parser, "--memory-gb", type=amount, metavar="GB", help="GPU memory, instead of --slots: as many as fit")
    add(parser, "--depth", type=whole, metavar="K", help="drafted tokens per round (default: the paper's)")
    add(parser, "--control", words=lambda: ("fixed", "governor", "online"), default="fixed", metavar="HOW",
        help="of the depth: fixed (default), governor or online")  # fmt: skip
    add_seed(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> Answer:
    if options.slots is not None and options.memory_gb is not None:
        raise UserError("--slots and --memory-gb say the same thing: give one of them")
    from specter_lab.experiments.context import check_seed
    from specter_lab.experiments.lab import what_if
    from specter_lab.models.zoo.shapes import SHAPES
    from specter_lab.plan.hardware import PAPERS_GPU, read_profile
    from specter_lab.plan.policies import find_policy

    check_seed(options.seed)
    if options.model not in SHAPES:
        raise UserError(f"'{options.model}' has no recorded routing: give one of {', '.join(zoo_models())}; `specter-lab measure` "
                        f"predicts for a model of yours")  # fmt: skip
    machine = read_profile(options.profile or PAPERS_GPU)
    known = what_if.policy_choices().values()
    for name in options.policy:
        if find_policy(name).id not in known:
            raise UserError(
                f"policy '{name}' drafts with other windows than are recorded here: choose from {', '.join(known)}"
            )
    print(f"routing of {options.model} (recorded on the first call, which takes minutes) ...", file=sys.stderr)
    start = what_if.setting_of(options.model, machine.name, options.seed)
    given = {"control": options.control, "slots": options.slots, "depth": options.depth}
    asked = replace(start, **{name: value for name, value in given.items() if value is not None})
    return _answer([what_if.ask(_for(policy, asked, options.memory_gb)) for policy in options.policy])


def _for(policy: str, question: what_if.Question, memory_gb: float | None) -> what_if.Question:
    from specter_lab.experiments.lab.what_if import slots_within

    question = replace(question, policy=policy)
    return question if memory_gb is None else replace(question, slots=slots_within(question, memory_gb))


def _answer(answers: list[what_if.Answer]) -> Answer:
    first = answers[0].question
    lines = [f"SIMULATED: {first.model} with its original's bytes, on {first.profile}",
             f"{'policy':<16}{'slots':>6}{'K':>6}{'ms/token':>10}{'draft':>8}{'compute':>9}{'stall':>8}{'hidden':>8}"
             f"{'MB/token':>10}{'GB held':>9}"]  # fmt: skip
    for found in answers:
        held, ms = sum(found.memory_gb.values()), found.simulated_ms
        hidden = "-" if not found.simulated_h2d_mb_per_token else f"{found.simulated_hidden_share:.0%}"
        note = "" if found.fits else f"  more than its {found.profile_gb:g} GB"
        note += "  changes the output" if found.lossy else ""
        lines.append(f"{found.question.policy:<16}{found.question.slots:>6}{found.mean_depth:>6.1f}"
                     f"{found.simulated_ms_per_token:>10.1f}{ms['draft']:>8.1f}{ms['compute']:>9.1f}{ms['stall']:>8.1f}"
                     f"{hidden:>8}{found.simulated_h2d_mb_per_token:>10.0f}{held:>9.1f}{note}")  # fmt: skip
    return Answer([_finite(asdict(found) | {"fits": found.fits}) for found in answers], "\n".join(lines))


def _finite(value: object) -> object:
    """NaN (a share of nothing) as null."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return None if value != value else value


def names() -> dict[str, Iterable[str]]:
    """Every name an option takes."""
    return {"models": zoo_models(), "policies": policies(), "profiles": profiles()}


COMMAND = Command(
    "simulate", "ms/token, bytes and memory on a machine you don't own",
    "specter-lab simulate deepseek-nano --policy specter lru specmoeoff\n"
    "specter-lab simulate qwen-nano --profile rtx4090 --memory-gb 16\n"
    "specter-lab simulate qwen-nano --profile this-machine --depth 4 --json",
    arguments, run, names=names,
    description="Replays recorded routing of a zoo model through the policies' own code, with the bytes and layers of the "
                "original that it stands for, on a named machine. Every time is simulated. `make lab-what-if` is the same with "
                "sliders.",
)  # fmt: skip
