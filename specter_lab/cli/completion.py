"""`specter-lab completion`: the script that completes commands, ids, options and files, made by shtab."""

from __future__ import annotations

import argparse

from specter_lab.cli.command import Answer, Command, add
from specter_lab.errors import UserError

SHELLS = ("bash", "zsh", "tcsh")


def arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "shell", words=lambda: SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(options: argparse.Namespace) -> Answer:
    if options.shell not in SHELLS:
        raise UserError(f"no completion for '{options.shell}': there is {', '.join(SHELLS)}")
    import shtab

    from specter_lab.cli.parser import COMMANDS, parser

    whole = parser()
    (commands,) = (action for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    commands.help = None  # shtab leaves out what is suppressed
    for name in COMMANDS:
        for action in commands.choices[name]._actions:
            if getattr(action, "words", None):
                action.choices = list(action.words())  # here only: a parser would refuse everything else
            elif getattr(action, "files", False):
                action.complete = shtab.FILE
    return Answer(None, shtab.complete(whole, shell=options.shell))


COMMAND = Command(
    "completion", "a script for your shell: Tab completes commands, ids, options",
    'eval "$(specter-lab completion bash)"                  # for this shell; some seconds, so for all of them rather:\n'
    "specter-lab completion bash > ~/.specter-lab.bash      # and in ~/.bashrc: source ~/.specter-lab.bash\n"
    "specter-lab completion zsh > ~/.zfunc/_specter-lab     # a folder in $fpath",
    arguments, run,
)  # fmt: skip
