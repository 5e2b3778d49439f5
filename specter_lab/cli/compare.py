"""`specter-lab compare`."""

from __future__ import annotations

import argparse
from collections import Counter

from specter_lab.cli.command import Answer, Command, add, add_tier, experiments
from specter_lab.cli.reproduce import chosen
from specter_lab.errors import UserError

VERDICTS = ("reproduced", "trend", "not reproduced", "not run", "not reproducible")


def arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "id", words=lambda: [*experiments(), "all"], nargs="?", default="all", metavar="ID",
        help="experiment id or alias (default: all)")  # fmt: skip
    add_tier(parser)
    add(parser, "--verdict", words=lambda: VERDICTS, metavar="VERDICT", help=f"these only: {', '.join(VERDICTS)}")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> Answer:
    if options.verdict not in (None, *VERDICTS):
        raise UserError(f"no verdict '{options.verdict}': give one of {', '.join(VERDICTS)}")
    from specter_lab.experiments.registry import check_tier, find

    ids = chosen(options.id, options.tier)
    for name in ids:
        check_tier(find(name), options.tier)
    claims = [claim for name in ids for claim in claims_of(name, options.tier)]
    shown = [claim for claim in claims if options.verdict in (None, claim["verdict"])]
    counted = Counter(claim["verdict"] for claim in claims)
    total = f"{len(claims)} claims: " + ", ".join(
        f"{counted[verdict]} {verdict}" for verdict in VERDICTS if counted[verdict]
    )
    return Answer(shown, "\n".join([*map(_lines, shown), f"\n{total}"]))


def claims_of(experiment: str, tier: str) -> list[dict[str, str]]:
    """Every claim of an experiment: paper, recorded, yours, verdict and why."""
    from specter_lab.experiments.compare import comparison

    return [{"experiment": experiment, "tier": tier, **row} for row in comparison(experiment, tier).to_dict("records")]


def _lines(claim: dict[str, str]) -> str:
    return (f"\n{claim['experiment']}: {claim['claim']}\n  paper {claim['paper']} / recorded {claim['recorded']} / yours "
            f"{claim['yours']}\n  {claim['verdict']}: {claim['why']}")  # fmt: skip


COMMAND = Command(
    "compare", "paper / recorded / yours for every claim, without running anything",
    "specter-lab compare table1\n"
    "specter-lab compare --verdict 'not reproduced'        # what did not hold, and why\n"
    "specter-lab compare kernel --tier gpu --json",
    arguments, run,
)  # fmt: skip
