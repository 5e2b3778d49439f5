"""What a command is, and the arguments that several of them take."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

EXIT_MISSING = EXIT_CLOSED_PIPE = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


@dataclass(frozen=True)
class Answer:
    """What a command found out: `data` is printed with --json (no NaN in it), `text` without; empty if it was printed already."""

    data: object
    text: str = ""
    status: int = 0


@dataclass(frozen=True)
class Command:
    """One subcommand. `arguments` and the module it stands in import nothing heavy; `run` imports what it needs."""

    name: str
    help: str  # one line of `specter-lab --help`
    examples: str  # lines, each a command and, behind two blanks and a #, what it does
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Answer]
    description: str = ""  # a paragraph of its own --help; default: `help`
    after_ctrl_c: str = ""  # what to do then
    names: Callable[[], dict[str, Iterable[str]]] | None = None  # its --help ends with every name an option takes


def add(
    parser: argparse._ActionsContainer, *flags: str, words: Callable[[], Iterable[str]] | None = None, files: bool = False,
    **how,
) -> None:  # fmt: skip
    """`add_argument`, with what the shell completes: `words` (imported when asked for), or files."""
    action = parser.add_argument(*flags, **how)
    action.words, action.files = words, files


def add_seed(parser: argparse.ArgumentParser) -> None:
    add(parser, "--seed", type=whole, default=0, metavar="N", help="of everything drawn (default: 0)")


def add_tier(parser: argparse.ArgumentParser) -> None:
    add(parser, "--tier", words=tiers, default="cpu", metavar="TIER", help=f"{', '.join(tiers())} (default: cpu)")


def add_model(parser: argparse.ArgumentParser, help: str = "zoo name, checkpoint folder or hub id") -> None:
    add(parser, "model", words=zoo_models, files=True, metavar="MODEL", help=help)


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number") from None


def number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no number") from None


def amount(text: str) -> float:
    """A finite number above zero."""
    if not 0 < (value := number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is no amount above zero")
    return value


def positive(text: str) -> int:
    """A whole number above zero."""
    if (value := whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not above zero")
    return value


def tiers() -> tuple[str, ...]:
    from specter_lab.experiments.registry import TIERS

    return TIERS


def experiments() -> list[str]:
    """Every id and alias."""
    from specter_lab.experiments.registry import EXPERIMENTS

    return [name for row in EXPERIMENTS.values() for name in (row.id, *row.aliases)]


def zoo_models() -> tuple[str, ...]:
    from specter_lab.models.load import ZOO_MODELS

    return ZOO_MODELS


def quantizers() -> Iterable[str]:
    from specter_lab.compress.quantizers import QUANTIZERS

    return QUANTIZERS


def drafts() -> tuple[str, ...]:
    from specter_lab.engine.draft import draft_names

    return draft_names()


def profiles() -> list[str]:
    from specter_lab.plan.hardware import profile_names

    return profile_names()


def policies() -> Iterable[str]:
    from specter_lab.plan.policies import POLICIES

    return POLICIES
