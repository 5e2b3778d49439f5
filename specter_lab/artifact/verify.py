"""`make verify`: does everything here fit together? Checksums, provenance, and every verdict judged again from its rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path

from tqdm.auto import tqdm

from specter_lab import paths
from specter_lab.artifact import documents, sums
from specter_lab.artifact.ledger import recorded
from specter_lab.errors import UserError
from specter_lab.experiments.claims import Setting, Verdict, claims_digest, judge_all
from specter_lab.experiments.registry import EXPERIMENTS
from specter_lab.experiments.results import Result, shown
from specter_lab.experiments.run import context_for

IN_WORDS = ("text", "why", "source", "headline", "aside")  # of a verdict: may be put better without another verdict
PROVENANCE = (
    "command",
    "seed",
    "finished",
    "wall_s",
    "question",
    "code_sha256",
    "inputs",
    "machine",
    "packages",
    "files",
)


@dataclass(frozen=True)
class Check:
    """What was looked at, what is wrong with it, and what could not be looked at here."""

    what: str
    problems: tuple[str, ...]
    skipped: tuple[str, ...] = ()


def checks() -> Iterator[Check]:
    """Every check, one after the other, for the project's results and for yours."""
    if (paths.ROOT / sums.NAME).exists():
        yield Check(f"files of the package against {sums.NAME}", tuple(sums.altered(paths.ROOT / sums.NAME)))
    yield Check("models and texts against data/MANIFEST.sha256", tuple(sums.altered(paths.DATA / "MANIFEST.sha256")))
    yield Check(
        "generated documents",
        tuple(f"{shown(path)} is out of date: run `make documents`" for path in documents.stale()),
    )
    for root in (paths.RECORDED, paths.RESULTS):
        whose = "recorded" if root == paths.RECORDED else "your"
        found = [result for experiment_id in EXPERIMENTS for result in recorded(experiment_id, root)]
        yield Check(f"{whose} results whole", tuple(broken(root)))
        if found:
            yield _over(found, f"{whose} results: where they come from", incomplete)
            yield _over(found, f"{whose} results: code that a commit holds", uncommitted)
            yield _over(found, f"{whose} results: models and texts as they are now", other_inputs)
            yield _over(found, f"{whose} verdicts judged again from their rows", other_verdicts)


def _over(results: list[Result], what: str, look: Callable[[Result], list[str]]) -> Check:
    problems, skipped = [], []
    for result in tqdm(results, desc=what, leave=False, disable=None):
        try:
            problems += [f"{result.experiment}, {result.tier}: {problem}" for problem in look(result)]
        except UserError as error:
            skipped.append(f"{result.experiment}, {result.tier}: {error}")
    return Check(f"{what} ({len(results) - len(skipped)} of {len(results)} runs)", tuple(problems), tuple(skipped))


def broken(root: Path) -> list[str]:
    """Folders of results that are half-written or altered."""
    folders = sorted(marker.parent for marker in root.glob("*/*/provenance.json") if marker.parts[-3] in EXPERIMENTS)
    whole = {result.folder for experiment_id in EXPERIMENTS for result in recorded(experiment_id, root)}
    return [f"{shown(folder)} is altered or of another version" for folder in folders if folder not in whole]


def incomplete(result: Result) -> list[str]:
    """What a result's provenance leaves out."""
    origin = result.provenance
    return [f"provenance has no {name}" for name in PROVENANCE if name not in origin]


def uncommitted(result: Result) -> list[str]:
    """Nothing: a commit either holds the code of a run, or it cannot be looked up.

    Raises:
        UserError: it cannot.
    """
    if result.provenance.get("uncommitted_changes"):
        raise UserError("run from a checkout that differed from its commit, so its code cannot be looked up")
    return []


def other_inputs(result: Result) -> list[str]:
    """Inputs whose sha256 is another one now.

    Raises:
        UserError: they are not here (weights that are trained, or come from a hub).
    """
    origin = result.provenance
    tier = _tier(result)
    models = origin["models"] if tier != result.tier else ()
    context = context_for(result.experiment, tier=tier, seed=origin["seed"], models=models)
    now = import_module(EXPERIMENTS[result.experiment].module).inputs(context)
    now = {name: digest for name, digest in now.items() if name in origin["inputs"]}
    return [f"{name} is another one now" for name, digest in now.items() if origin["inputs"][name] != digest]


def other_verdicts(result: Result) -> list[str]:
    """Claims on which today's claims.toml and code, given the stored rows, do not say what claims.json says."""
    origin = result.provenance
    setting = Setting(_tier(result), own_models=_tier(result) != result.tier, gpu=origin["machine"]["gpu"])
    try:
        measured = import_module(EXPERIMENTS[result.experiment].module).claims(result.rows)
    except (KeyError, AttributeError) as error:  # columns that an older version did not write
        return [f"its rows are not those that today's code reads ({error}): run it again"]
    now = {verdict.id: verdict for verdict in judge_all(result.experiment, measured, setting)}
    stored = {verdict.id: verdict for verdict in result.verdicts}
    wrong = [
        f"{name} is {'not judged in claims.json' if name in now else 'no claim any more'}"
        for name in sorted(now.keys() ^ stored.keys())
    ]
    wrong += [f"{name}: {said}" for name in now.keys() & stored.keys() if (said := difference(stored[name], now[name]))]
    if not wrong and claims_digest(result.experiment) != origin["inputs"]["claims"]:
        wrong = ["the wording of its claims has changed since: run it again"]
    return wrong


def difference(stored: Verdict, now: Verdict) -> str:
    """In which numbers or words two verdicts differ; empty when they agree. How a verdict is explained does not count."""
    names = [field.name for field in fields(Verdict) if field.name not in IN_WORDS]
    pairs = {name: (getattr(stored, name), getattr(now, name)) for name in names}
    return ", ".join(f"{name} {one} is now {other}" for name, (one, other) in pairs.items() if not _same(one, other))


def _same(one: object, other: object) -> bool:
    """Equal; floats up to what reading them from a CSV file may cost."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    return one == other


def _tier(result: Result) -> str:
    """The tier of a result: its folder is `<tier>-own` when the user chose the models."""
    return result.tier.removesuffix("-own")


def main() -> int:
    """Print every check. Returns the exit status: 1 if one found a problem."""
    failed = 0
    for check in checks():
        failed += bool(check.problems)
        print(f"{'WRONG' if check.problems else 'ok':<6}{check.what}", flush=True)
        for line in check.problems:
            print(f"      {line}")
        for line in check.skipped:
            print(f"      not looked at: {line}")
    print("all of it fits together" if not failed else f"{failed} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
