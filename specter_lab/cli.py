"""`specter-lab`: the same as the make targets, for the shell."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from specter_lab.errors import NotTrained, UserError
from specter_lab.experiments.registry import DEFAULT_MODELS, EXPERIMENTS, TIERS, find
from specter_lab.files import disk_problem

EXIT_MISSING = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit status: 0, 2 for a UserError or a disk that refuses, 130 for Ctrl-C, and 1
    when `doctor` found something needed missing or nobody reads the output."""
    options = _parser().parse_args(arguments)
    try:
        status = options.function(options) or 0
        sys.stdout.flush()  # or a closed pipe and a full disk would show only after the last word
        return status
    except UserError as error:
        return _fail(str(error), EXIT_USER_ERROR)
    except KeyboardInterrupt:
        return _fail("stopped by Ctrl-C: run the same command again, finished rows are kept", EXIT_INTERRUPTED)
    except BrokenPipeError:  # `specter-lab table | head`: whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_MISSING
    except Exception as error:
        if sentence := disk_problem(error):
            return _fail(sentence, EXIT_USER_ERROR)
        raise


def _fail(sentence: str, status: int) -> int:
    print(f"specter-lab: {sentence}", file=sys.stderr)
    return status


class _HelpWithNames(argparse.Action):
    """--help that ends with every name an option takes; reading them takes torch, so other commands don't."""

    def __call__(self, parser: argparse.ArgumentParser, *_) -> None:
        from specter_lab.compress.quantizers import QUANTIZERS
        from specter_lab.measure.hub_prompts import HUB_SETS
        from specter_lab.measure.prompts import PROMPT_SETS
        from specter_lab.plan.hardware import profile_names

        known = {"quantisers": QUANTIZERS, "prompt sets": PROMPT_SETS, "prompt sets of the model hub": HUB_SETS,
                 "profiles": profile_names()}  # fmt: skip
        lines = (f"{kind}: {', '.join(names)}" for kind, names in known.items())
        parser.epilog = "\n".join(fill(line, 100, subsequent_indent="  ", break_on_hyphens=False) for line in lines)
        parser.print_help()
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specter-lab", description="Reproduce figures and tables of three papers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("list", help="every experiment, with its tiers and minutes")
    command.set_defaults(function=_list)

    command = commands.add_parser("reproduce", help="run an experiment and its notebook, compare with the paper")
    command.add_argument("id", help="experiment id or alias, or 'all'")
    command.add_argument("--tier", default="cpu", help=f"{', '.join(TIERS)} (default: cpu)")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--fresh", action="store_true", help="compute the rows again; quantised models are kept")
    command.add_argument("--models", nargs="+", default=(), metavar="MODEL", help="zoo names, folders or hub ids")
    command.add_argument("--runner", default="local", help="where rows are computed: local (default) or ray")
    command.set_defaults(function=_reproduce)

    command = commands.add_parser("measure", help="routing, acceptance and predicted K* of a model of your own",
                                  add_help=False, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    command.add_argument("-h", "--help", action=_HelpWithNames, nargs=0, help="show this, and every name there is")
    command.add_argument("model", metavar="MODEL", help="zoo name, folder or hub id")
    command.add_argument("--quantizer", default="gptq-int4", help="of the draft's experts, by name, or a quantised "
                         "checkpoint (default: gptq-int4)")  # fmt: skip
    command.add_argument("--prompts", nargs="+", default=None, metavar="FILE", help=".txt or .jsonl files, or prompt sets by "
                         "name (default: all sets)")  # fmt: skip
    command.add_argument("--requests", type=int, default=20, help="prompts of each (default: 20)")
    command.add_argument("--max-tokens", type=int, help="cut prompts to so many tokens (default: all)")
    command.add_argument("--depth", type=int, default=16, help="largest K (default: 16)")
    command.add_argument("--profile", default=None, help="machine of the prediction, by name (default: "
                         "the paper's A100)")  # fmt: skip
    command.add_argument("--memory-gb", type=float, help="its GPU memory (default: all it has)")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--device", default=None, help="where to measure (default: the GPU if there is one, but the CPU "
                         "for shipped models)")  # fmt: skip
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.set_defaults(function=_measure)

    command = commands.add_parser("doctor", help="what is installed, how fast this machine is; writes its profile")
    command.add_argument("--json", action="store_true", help="print JSON instead of a report")
    command.set_defaults(function=_doctor)

    command = commands.add_parser("widen", help="grow a small model to its original's full size, same function")
    command.add_argument("model", metavar="MODEL", help="zoo name, or a checkpoint folder with an original's routing")
    command.add_argument(
        "out", metavar="FOLDER", help="where the wide checkpoint goes (28 GB for Qwen1.5-MoE's 24 layers)"
    )
    command.add_argument("--to", default=None, metavar="MODEL", help="the original (default: the zoo model's own)")
    command.set_defaults(function=_widen)

    command = commands.add_parser("pack", help="compress a checkpoint's experts into a store; goes on after a kill")
    command.add_argument("model", metavar="MODEL", help="zoo name, folder or hub id, in BF16")
    command.add_argument("store", metavar="STORE", help="folder of the store")
    command.add_argument("--codec", default="huffman", help="none, lz4, lz4hc, zstd, with a level as in zstd-3, or huffman "
                         "(default)")  # fmt: skip
    command.add_argument("--shards", type=int, default=3, help="pieces that exponents are compressed in (default: 3)")
    command.add_argument("--raw", action="store_true", help="keep the experts as they are beside it, for in-place use "
                         "while the page cache holds them")  # fmt: skip
    command.set_defaults(function=_pack)

    command = commands.add_parser("verify", help="check every byte of a store")
    command.add_argument("store", metavar="STORE", help="folder of the store")
    command.add_argument("--against", default=None, metavar="MODEL", help="compare with this checkpoint bit for bit")
    command.set_defaults(function=_verify)

    command = commands.add_parser("lab", help="execute a lab notebook headless")
    command.add_argument("id", help="lab-your-model, ...")
    command.add_argument("parameters", nargs="*", metavar="NAME=VALUE", help="of the notebook")
    command.set_defaults(function=_lab)

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

    how = {name: getattr(options, name) for name in ("tier", "seed", "fresh", "models", "runner")}
    failed, waiting = [], []
    for name in ids:
        try:
            reproduce(name, **how)
        except NotTrained as error:
            if len(ids) == 1:
                raise
            waiting.append(f"{name} ({error})")
        except UserError as error:
            if len(ids) == 1:
                raise
            failed.append(f"{name} ({error})")
    if waiting:
        print(f"not run: {'; '.join(waiting)}")
    if failed:
        raise UserError(f"{len(failed)} of {len(ids)} experiments failed: {'; '.join(failed)}")


def _measure(options: argparse.Namespace) -> None:
    from specter_lab.experiments.lab.your_model import measure_model

    names = ("quantizer", "prompts", "requests", "max_tokens", "depth", "profile", "memory_gb", "seed", "device")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    report = measure_model(options.model, on_step=lambda text: print(f"{text} ...", file=sys.stderr), **given)
    print(report.to_json() if options.json else report.to_text())


def _doctor(options: argparse.Namespace) -> int:
    from specter_lab.plan.doctor import examine

    report = examine(on_step=lambda text: print(f"{text} ...", file=sys.stderr))
    print(report.to_json() if options.json else report.to_text())
    return 0 if report.works else EXIT_MISSING


def _widen(options: argparse.Namespace) -> None:
    from specter_lab.models.widen import widen_named

    widen_named(options.model, options.out, options.to)


def _pack(options: argparse.Namespace) -> None:
    from specter_lab.engine.store.pack import pack

    if options.shards < 1:
        raise UserError(f"exponents are cut into one piece or more, not {options.shards}: give --shards 3")
    index = pack(options.model, Path(options.store), codec=options.codec, shards=options.shards, raw=options.raw)
    print(
        f"{options.store}: {len(index.experts)} experts, {index.total_bytes / 1e6:.1f} MB in {index.stored_share:.1%} of it"
    )


def _verify(options: argparse.Namespace) -> None:
    from specter_lab.engine.store.verify import verify

    index = verify(Path(options.store), against=options.against)
    print(f"{options.store}: {len(index.experts)} experts of {index.model} are whole" + (
        f", bit for bit those of {options.against}" if options.against else ""))  # fmt: skip


def _lab(options: argparse.Namespace) -> None:
    from specter_lab.experiments.runner import run_lab

    for word in options.parameters:
        if "=" not in word:
            raise UserError(f"'{word}' is no parameter: write NAME=VALUE")
    given = {name.lower(): value for name, value in (word.split("=", 1) for word in options.parameters)}
    print(f"executed: {run_lab(options.id, given)}")


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
