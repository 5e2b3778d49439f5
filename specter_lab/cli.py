"""`specter-lab`: the same as the make targets, for the shell."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence

from specter_lab.errors import UserError
from specter_lab.experiments.registry import DEFAULT_MODELS, EXPERIMENTS, TIERS, find

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit status: 0, 2 for a UserError or a full disk, 130 for Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        options.function(options)
    except UserError as error:
        return _fail(str(error), EXIT_USER_ERROR)
    except KeyboardInterrupt:
        return _fail("stopped by Ctrl-C: run the same command again, finished rows are kept", EXIT_INTERRUPTED)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        where = f" (writing {error.filename})" if error.filename else ""
        return _fail(
            f"the disk is full{where}: free some space (`make clean` removes caches and results) and run the same "
            f"command again, nothing half-written is kept",
            EXIT_USER_ERROR,
        )
    return 0


def _fail(sentence: str, status: int) -> int:
    print(f"specter-lab: {sentence}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specter-lab", description="Reproduce figures and tables of three papers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("list", help="every experiment, with its tiers and minutes")
    command.set_defaults(function=_list)

    command = commands.add_parser("reproduce", help="run an experiment and its notebook, compare with the paper")
    command.add_argument("id", help="experiment id or alias, or 'all'")
    command.add_argument("--tier", default="cpu", help=f"{', '.join(TIERS)} (default: cpu)")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--fresh", action="store_true", help="measure again, whatever is in the cache")
    command.add_argument("--models", nargs="+", default=(), metavar="MODEL", help="zoo names, folders or hub ids")
    command.set_defaults(function=_reproduce)

    command = commands.add_parser("record", help="make your result the recorded one (artifacts/recorded)")
    command.add_argument("id", help="experiment id or alias, or 'all'")
    command.add_argument("--tier", default="cpu")
    command.set_defaults(function=_record)

    command = commands.add_parser("table", help="the headline claims as a Markdown table")
    command.add_argument("--readme", action="store_true", help="write it into README.md instead of printing it")
    command.set_defaults(function=_table)
    return parser


def _list(options: argparse.Namespace) -> None:
    from specter_lab.experiments.help import render

    print(render())


def _reproduce(options: argparse.Namespace) -> None:
    ids = _ids(options.id, options.tier)
    from specter_lab.experiments.runner import reproduce

    failed = []
    for name in ids:
        try:
            reproduce(name, tier=options.tier, seed=options.seed, fresh=options.fresh, models=options.models)
        except UserError as error:
            if len(ids) == 1:
                raise
            failed.append(f"{name} ({error})")
    if failed:
        raise UserError(f"{len(failed)} of {len(ids)} experiments failed: {'; '.join(failed)}")


def _record(options: argparse.Namespace) -> None:
    ids = _ids(options.id, options.tier)
    from specter_lab.experiments import results

    for name in ids:
        results.record(name, options.tier)
        print(f"recorded {name}, {options.tier} tier")


def _table(options: argparse.Namespace) -> None:
    from specter_lab.experiments import compare

    if options.readme:
        compare.update_readme()
    else:
        print(compare.markdown(compare.headline_table()))


def _ids(name: str, tier: str) -> list[str]:
    """The experiments meant by an id, an alias or 'all' (those that have the tier). Raises UserError for others."""
    if tier not in DEFAULT_MODELS:
        raise UserError(f"no tier '{tier}': give one of {', '.join(TIERS)}")
    if name == "all":
        return [row.id for row in EXPERIMENTS.values() if tier in row.tiers]
    return [find(name).id]


if __name__ == "__main__":
    sys.exit(main())
