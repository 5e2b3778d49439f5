"""Every claim of the papers beside what was recorded about it: what appendices, status page and package are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specter_lab import paths
from specter_lab.artifact.papers import Paper, paper_of
from specter_lab.experiments import results
from specter_lab.experiments.claims import NOT_RUN, TREND_TOLERANCES, Claim, Verdict, read_claims
from specter_lab.experiments.compare import in_unit
from specter_lab.experiments.registry import EXPERIMENTS, Experiment
from specter_lab.experiments.results import Result


@dataclass(frozen=True)
class Entry:
    """One claim, and one recorded result that judged it."""

    claim: Claim
    paper: Paper
    experiment: Experiment | None  # None: this version has no experiment for it
    result: Result | None  # None: nothing recorded judges it
    verdict: Verdict | None

    @property
    def experiment_id(self) -> str:
        return self.claim.id.split("/")[0]

    @property
    def said(self) -> str:
        """The verdict, in one of the five words."""
        return self.verdict.verdict if self.verdict else NOT_RUN

    @property
    def why(self) -> str:
        if self.verdict:
            return self.verdict.why
        return "nothing recorded yet" if self.experiment else "no experiment for it in this version"


def recorded(experiment_id: str, root: Path = paths.RECORDED) -> list[Result]:
    """The whole results of one experiment under `root`, by tier."""
    folder = root / experiment_id
    tiers = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
    return [result for tier in tiers if (result := results.read(experiment_id, tier, root))]


def ledger() -> list[Entry]:
    """All claims in the order of claims.toml, once for every recorded result that judged them, at least once.

    A tier that cannot measure a claim does not count as having judged it where another tier did.
    """
    claims = read_claims(paths.CLAIMS).values()
    results_of = {
        experiment_id: recorded(experiment_id) for experiment_id in {claim.id.split("/")[0] for claim in claims}
    }
    return [entry for claim in claims for entry in _entries(claim, results_of[claim.id.split("/")[0]])]


def _entries(claim: Claim, recorded_results: list[Result]) -> Iterator[Entry]:
    experiment_id = claim.id.split("/")[0]
    fixed = claim, paper_of(experiment_id), EXPERIMENTS.get(experiment_id)
    found = [(result, verdict) for result in recorded_results for verdict in result.verdicts if verdict.id == claim.id]
    measured = [(result, verdict) for result, verdict in found if verdict.ours is not None]
    for result, verdict in measured or found[:1] or [(None, None)]:
        yield Entry(*fixed, result, verdict)


def allowed(claim: Claim) -> str:
    """How far ours may be from the paper's, in words."""
    if claim.missing:
        return "cannot be checked"
    if claim.kind == "absolute":
        return f"± {100 * claim.tolerance:.3g} %, trend: ± {100 * TREND_TOLERANCES * claim.tolerance:.3g} %"
    if claim.kind == "ratio":
        return f"± {100 * claim.tolerance:.3g} %, trend: same side of 1"
    if claim.kind == "ordering":
        return f"every pair, trend: {100 * (1 - claim.tolerance):.0f} % of them"
    if claim.kind == "threshold":
        return "whole interval within, trend: the value"
    return f"inside, trend: off by {in_unit(claim.tolerance, claim.unit)}"
