"""`specter-lab reproduce`."""

from __future__ import annotations

import argparse

from specter_lab.cli.command import Answer, Command, add, add_seed, add_tier, experiments, zoo_models
from specter_lab.errors import NotTrained, UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "id", words=lambda: [*experiments(), "all"], metavar="ID", help="experiment id or alias, or 'all'")
    add_tier(parser)
    add_seed(parser)
    parser.add_argument("--fresh", action="store_true", help="compute the rows again; quantised models are kept")
    add(parser, "--models", words=zoo_models, files=True, nargs="+", default=(), metavar="MODEL",
        help="zoo names, folders or hub ids (default: the tier's)")  # fmt: skip
    add(parser, "--runner", words=lambda: ("local", "ray"), default="local", metavar="RUNNER",
        help="where rows are computed: local (default) or ray")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the claims with their verdicts as JSON")


def run(options: argparse.Namespace) -> Answer:
    ids = chosen(options.id, options.tier)
    from specter_lab.cli.compare import claims_of
    from specter_lab.experiments.runner import reproduce, reproduce_each

    how = {name: getattr(options, name) for name in ("tier", "seed", "fresh", "models", "runner")}
    if len(ids) == 1:
        return Answer(claims_of(ids[0], reproduce(ids[0], **how).tier))
    failed, waiting, claims = [], [], []
    for name, outcome in reproduce_each(ids, **how):
        if isinstance(outcome, UserError):
            (waiting if isinstance(outcome, NotTrained) else failed).append(f"{name} ({outcome})")
        else:
            claims += claims_of(name, outcome.tier)
    if waiting:
        print(f"not run: {'; '.join(waiting)}")
    if failed:
        raise UserError(f"{len(failed)} of {len(ids)} experiments failed: {'; '.join(failed)}")
    return Answer(claims)


def chosen(name: str, tier: str) -> list[str]:
    """The experiments meant by an id, an alias or 'all' (those that have the tier). Raises UserError for others."""
    from specter_lab.experiments.registry import DEFAULT_MODELS, EXPERIMENTS, TIERS, find

    if tier not in DEFAULT_MODELS:
        raise UserError(f"no tier '{tier}': give one of {', '.join(TIERS)}")
    if name == "all":
        return [row.id for row in EXPERIMENTS.values() if tier in row.tiers]
    return [find(name).id]


COMMAND = Command(
    "reproduce", "run an experiment and its notebook, compare with the paper",
    "specter-lab reproduce table1                          # an alias; `specter-lab list` has them all\n"
    "specter-lab reproduce specter-hit-rate --seed 1\n"
    "specter-lab reproduce table1 --models path/to/checkpoint\n"
    "specter-lab reproduce all                             # everything of the cpu tier",
    arguments, run, after_ctrl_c="run the same command again, finished rows are kept",
    description="Computes the rows (with progress; what is finished is kept), executes the notebook over them, and prints "
                "paper / recorded / yours and a verdict for every claim.",
)  # fmt: skip
