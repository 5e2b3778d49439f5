"""The papers whose claims are checked, as artifacts/papers.toml has them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache

from specter_lab import paths
from specter_lab.errors import UserError

FILE = paths.ROOT / "artifacts" / "papers.toml"


@dataclass(frozen=True)
class Paper:
    """One paper. `prefix` is what the ids of its experiments and claims begin with."""

    prefix: str
    name: str
    title: str
    authors: str
    url: str
    idea: str  # what the paper proposes, in two sentences
    setting: str  # the machine its numbers come from
    models: str
    data: str
    notes: tuple[str, ...]  # what a reader of the verdicts should know


@cache
def papers() -> dict[str, Paper]:
    """All papers by prefix, in the order of the file.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        read = tomllib.loads(FILE.read_text(encoding="utf-8"))
        return {
            prefix: Paper(prefix, **{**entry, "idea": " ".join(entry["idea"].split()), "notes": tuple(entry["notes"])})
            for prefix, entry in read.items()
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{FILE} is missing or damaged ({error}): restore it with `git checkout -- artifacts`"
        ) from error


def paper_of(experiment_id: str) -> Paper:
    """The paper an experiment or a claim belongs to, by the prefix of its id.

    Raises:
        UserError: there is no such paper.
    """
    prefix = experiment_id.split("-")[0]
    if prefix not in papers():
        raise UserError(
            f"no paper '{prefix}' in {FILE.name}: the ids of {experiment_id} begin with it, so add it there"
        )
    return papers()[prefix]
