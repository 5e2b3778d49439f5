"""From words to a command and its options; every mistake is a UserError of one sentence."""

from __future__ import annotations

import argparse
import difflib
import shutil
from collections.abc import Sequence
from textwrap import fill

from specter_lab import __version__
from specter_lab.cli import (
    compare,
    completion,
    doctor,
    generate,
    lab,
    listing,
    measure,
    pack,
    package,
    quantize,
    record,
    reproduce,
    serve,
    simulate,
    table,
    verify,
    widen,
)
from specter_lab.cli.command import Command
from specter_lab.errors import UserError

GROUPS = {
    "reproduce the papers": (listing, reproduce, compare, table, record, package),
    "measure and plan": (doctor, measure, simulate, lab),
    "work with a model": (generate, serve, quantize, widen, pack, verify),
    "the shell": (completion,),
}
COMMANDS = {module.COMMAND.name: module.COMMAND for group in GROUPS.values() for module in group}
ABOUT = "A laboratory for Mixture-of-Experts language models that do not fit the GPU."
EXAMPLES = """\
specter-lab reproduce table1                                   # Specter's Table 1: paper / ours / verdict
specter-lab measure qwen-nano --requests 5                     # routing, acceptance, predicted K* of a model
specter-lab simulate deepseek-nano --profile rtx4090           # what a machine you don't own would do
specter-lab generate qwen-nano "The old man"                   # text, tokens/s, hits, bytes
specter-lab serve qwen-nano                                    # OpenAI's protocol at http://127.0.0.1:8000/v1
eval "$(specter-lab completion bash)"                          # Tab completes commands, ids, options"""
EPILOG = """\
Every command explains itself: specter-lab COMMAND --help.
Every command that prints a result takes --json: the result alone goes to standard output, progress to standard error.

exit status
  0    done
  1    a bug (with a stack trace: please report it), something missing (doctor), or nobody read the output
  2    something you can put right; one sentence says what and how
  130  Ctrl-C (143: SIGTERM)"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, as everything here does."""

    def error(self, message: str) -> None:
        message = message.removeprefix("argument ").replace("the following arguments are required:", "missing:")
        raise UserError(f"{message} (`{self.prog} --help` shows how)")


def parse(arguments: Sequence[str]) -> tuple[Command, argparse.Namespace]:
    """The command and its options. Raises UserError for what it doesn't understand, SystemExit after --help or --version."""
    first = arguments[0] if arguments else ""
    if not first:
        raise UserError("which command? `specter-lab --help` lists them")
    if not first.startswith("-") and first not in COMMANDS:
        raise UserError(f"no command '{first}': {_meant(first, COMMANDS) or '`specter-lab --help` lists them all'}")
    options, unknown = parser().parse_known_args(arguments)
    if unknown:
        raise UserError(_too_much(unknown[0], options.parser))
    return COMMANDS[options.command], options


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    plain = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    groups = "\n\n".join(f"{title}\n" + "\n".join(f"  {m.COMMAND.name:<12}{m.COMMAND.help}" for m in modules)
                         for title, modules in GROUPS.items())  # fmt: skip
    whole = Parser("specter-lab", usage="specter-lab COMMAND ...", description=f"{ABOUT}\n\n{groups}",
                   epilog=f"examples\n{_indented(EXAMPLES)}\n\n{EPILOG}", **plain)  # fmt: skip
    whole.add_argument("--version", action="version", version=f"specter-lab {__version__}")
    commands = whole.add_subparsers(
        prog="specter-lab", dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS
    )
    for command in COMMANDS.values():
        about = fill(command.description or f"{command.help[0].upper()}{command.help[1:]}.", width())
        epilog = f"examples\n{_indented(command.examples)}"
        one = commands.add_parser(command.name, help=command.help, description=about, epilog=epilog, add_help=False,
                                  **plain)  # fmt: skip
        one.add_argument("-h", "--help", action=_Help, nargs=0, names=command.names, help="show this")
        command.arguments(one)
        one.set_defaults(parser=one)
    return whole


def width() -> int:
    """Of what is printed: the terminal's, up to a line that reads well."""
    return min(100, shutil.get_terminal_size().columns - 2)


class _Help(argparse.Action):
    """--help that ends with every name an option takes; reading them may take torch, so it is done only here."""

    def __init__(self, *args, names=None, **how) -> None:
        super().__init__(*args, **how)
        self._names = names

    def __call__(self, parser: argparse.ArgumentParser, *_) -> None:
        lines = [f"{kind}: {', '.join(names)}" for kind, names in (self._names() if self._names else {}).items()]
        named = "\n".join(fill(line, width(), subsequent_indent="  ", break_on_hyphens=False) for line in lines)
        parser.epilog += f"\n\n{named}" if named else ""
        parser.print_help()
        parser.exit()


def _too_much(word: str, parser: argparse.ArgumentParser) -> str:
    shows = f"`{parser.prog} --help` shows what it takes"
    if not word.startswith("-"):
        return f"'{word}' is too much: {shows}"
    known = [flag for action in parser._actions for flag in action.option_strings]
    return f"{parser.prog} has no option '{word}': {_meant(word, known) or shows}"


def _meant(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else ""


def _indented(lines: str) -> str:
    return "\n".join(f"  {line}" for line in lines.splitlines())
