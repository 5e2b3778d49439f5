"""The papers' claims (artifacts/claims.toml) and how a measured value is judged against one.

The rules are fixed before any run; they are also written at the head of claims.toml:

| kind | what is compared | reproduced | trend |
|---|---|---|---|
| absolute | ours and the paper's value | relative difference <= tolerance | <= 3 x tolerance |
| ratio | a factor, 1 = no effect | relative difference <= tolerance | same side of 1 |
| ordering | share of the claimed pairs that hold | every pair | at least 1 - tolerance of them |
| threshold | ours and a bound | the whole interval within the bound | the value alone |
| shape | the number that describes a curve, and its range | inside | outside by <= tolerance |

Two caps: an absolute value or ratio that depends on trained weights and was measured on other models than the
paper's, and anything simulated, is a trend at best. A claim about one class of GPU is judged on values measured there; a
simulated one gets no verdict, whichever machine it was simulated on, and how far off it is stands beside it.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.experiments.context import Measured

KINDS = ("absolute", "ratio", "ordering", "threshold", "shape")
REPRODUCED, TREND, NOT_REPRODUCED = "reproduced", "trend", "not reproduced"
NOT_RUN, NOT_REPRODUCIBLE = "not run", "not reproducible"
VERDICTS = (REPRODUCED, TREND, NOT_REPRODUCED, NOT_RUN, NOT_REPRODUCIBLE)
TREND_TOLERANCES = 3  # an absolute value this many tolerances away still shows the trend


@dataclass(frozen=True)
class Claim:
    """One checkable statement of a paper, as written in claims.toml."""

    id: str  # <experiment id>/<short name>, and @<point> for one point of a series
    text: str
    kind: str
    unit: str  # share, x, ms/token, ...; pairs for an ordering
    source: str  # where the number was read: S, V1, A or C (legend in claims.toml)
    value: float | None = None  # the paper's number
    tolerance: float = 0.0
    at_least: float | None = None
    at_most: float | None = None
    gpu: str = ""  # an absolute time counts only on this class of GPU
    any_weights: bool = False  # bytes, kernels, arithmetic: does not depend on trained weights
    missing: str = ""  # what nobody outside has; the claim cannot be checked without it
    headline: bool = False  # shown in README.md


@dataclass(frozen=True)
class Setting:
    """Where a value was measured, as far as it matters for the verdict."""

    tier: str
    own_models: bool = False
    gpu: str | None = None  # device name

    @property
    def papers_models(self) -> bool:
        return self.tier == "paper" and not self.own_models


@dataclass(frozen=True)
class Verdict:
    """One row of claims.json."""

    id: str
    text: str
    kind: str
    unit: str
    source: str
    headline: bool
    paper: float | None
    at_least: float | None
    at_most: float | None
    tolerance: float
    ours: float | None
    low: float | None
    high: float | None
    n: int | None
    simulated: bool
    verdict: str
    why: str
    aside: str = ""  # what tables put beside the value


def _series(claim_id: str, entry: Mapping) -> Iterable[Claim]:
    """One claim, or one per point when the entry lists several values `at` several points."""
    if "at" not in entry:
        yield Claim(id=claim_id, **entry)
        return
    rest = {key: value for key, value in entry.items() if key not in ("at", "value", "text")}
    for point, value in zip(entry["at"], entry["value"], strict=True):
        yield Claim(id=f"{claim_id}@{point}", text=entry["text"].replace("{at}", str(point)), value=value, **rest)


def _check(claim: Claim) -> Claim:
    bounded = claim.at_least is not None or claim.at_most is not None
    if claim.kind not in KINDS:
        raise ValueError(f"{claim.id}: kind '{claim.kind}' is none of {', '.join(KINDS)}")
    if claim.missing:
        return claim
    if claim.kind in ("absolute", "ratio") and not (claim.value and claim.tolerance > 0):
        raise ValueError(f"{claim.id}: an {claim.kind} claim needs a value other than 0 and a tolerance")
    if claim.kind in ("threshold", "shape") and not bounded:
        raise ValueError(f"{claim.id}: a {claim.kind} claim needs at_least or at_most")
    return claim


@cache
def read_claims(path: Path) -> dict[str, Claim]:
    """All claims by id, in the order of the file.

    Raises:
        UserError: the file is missing or damaged, or has an entry that no verdict could be given on.
    """
    try:
        return {
            claim.id: _check(claim)
            for experiment, entries in tomllib.loads(path.read_text(encoding="utf-8")).items()
            for name, entry in entries.items()
            for claim in _series(f"{experiment}/{name}", entry)
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is missing or damaged ({error}): restore it with `git checkout -- artifacts`"
        ) from error


def claims_of(experiment_id: str) -> list[Claim]:
    """The claims whose id starts with an experiment's id, in the order of the file."""
    return [claim for claim in read_claims(paths.CLAIMS).values() if claim.id.split("/")[0] == experiment_id]


def claims_digest(experiment_id: str) -> str:
    """sha256 over an experiment's claims: verdicts given on other claims or tolerances are stale."""
    return hashlib.sha256(repr(claims_of(experiment_id)).encode()).hexdigest()


def share_of_pairs_in_order(values: Sequence[float]) -> float:
    """Share of all pairs i < j with values[i] <= values[j]: the value of an ordering claim.

    Raises:
        ValueError: fewer than two values.
    """
    pairs = [(a, b) for i, a in enumerate(values) for b in values[i + 1 :]]
    if not pairs:
        raise ValueError("an ordering needs at least two values")
    return sum(a <= b for a, b in pairs) / len(pairs)


def _absolute(claim: Claim, measured: Measured) -> tuple[str, str]:
    off = abs(measured.value / claim.value - 1)
    why = f"{off:.1%} from the paper's value, tolerance {claim.tolerance:.1%}"
    if off <= claim.tolerance:
        return REPRODUCED, why
    return (TREND if off <= TREND_TOLERANCES * claim.tolerance else NOT_REPRODUCED), why


def _ratio(claim: Claim, measured: Measured) -> tuple[str, str]:
    off = abs(measured.value / claim.value - 1)
    why = f"{off:.1%} from the paper's factor, tolerance {claim.tolerance:.1%}"
    if off <= claim.tolerance:
        return REPRODUCED, why
    if (measured.value - 1) * (claim.value - 1) <= 0:
        return NOT_REPRODUCED, f"{why}, other side of 1"
    far = off > TREND_TOLERANCES * claim.tolerance  # for a large factor the rule asks for next to nothing
    return TREND, f"{why}, same side of 1" + (", which is all that this trend says" if far else "")


def _ordering(claim: Claim, measured: Measured) -> tuple[str, str]:
    why = f"{measured.value:.0%} of the claimed pairs hold"
    if measured.value >= 1:
        return REPRODUCED, why
    return (TREND if measured.value >= 1 - claim.tolerance else NOT_REPRODUCED), why


def _within(value: float, claim: Claim, slack: float = 0.0) -> bool:
    above = claim.at_least is None or value >= claim.at_least - slack
    return above and (claim.at_most is None or value <= claim.at_most + slack)


def _threshold(claim: Claim, measured: Measured) -> tuple[str, str]:
    ends = [end for end in (measured.low, measured.high) if end is not None]
    if not _within(measured.value, claim):
        return NOT_REPRODUCED, "the value is outside the bound"
    if all(_within(end, claim) for end in ends):
        return REPRODUCED, "the whole interval is within the bound" if ends else "the value is within the bound"
    return TREND, "the value is within the bound, its interval is not"


def _shape(claim: Claim, measured: Measured) -> tuple[str, str]:
    if _within(measured.value, claim):
        return REPRODUCED, "inside the range"
    near = _within(measured.value, claim, slack=claim.tolerance)
    return (TREND, "just outside the range") if near else (NOT_REPRODUCED, "outside the range")


_JUDGES = {"absolute": _absolute, "ratio": _ratio, "ordering": _ordering, "threshold": _threshold, "shape": _shape}


def _decide(claim: Claim, measured: Measured | None, setting: Setting) -> tuple[str, str]:
    if claim.missing:
        return NOT_REPRODUCIBLE, f"input missing: {claim.missing}"
    if measured is None:
        return NOT_RUN, f"the {setting.tier} tier does not measure it"
    if measured.value is None:
        return NOT_RUN, measured.note or "not measured"
    if claim.gpu and not measured.simulated and claim.gpu not in (setting.gpu or ""):
        return NOT_RUN, f"measured on {setting.gpu or 'a CPU'}, comparable on {claim.gpu} only"
    verdict, why = _JUDGES[claim.kind](claim, measured)
    if measured.note:
        why += f"; {measured.note}"
    if claim.gpu and measured.simulated:
        return NOT_RUN, f"simulated, not measured on {_a(claim.gpu)}; {why}"
    other_models = not (claim.any_weights or setting.papers_models)
    if other_models:
        why += "; on models of your choice" if setting.own_models else "; on zoo models, not the paper's"
    if measured.simulated:
        why += "; simulated"
    capped = measured.simulated or (other_models and claim.kind in ("absolute", "ratio"))
    return (TREND if capped and verdict == REPRODUCED else verdict), why


def _a(name: str) -> str:
    """A class of GPU with its article."""
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def judge(claim: Claim, measured: Measured | None, setting: Setting) -> Verdict:
    """The verdict on one claim; `measured` is None when the run has no value for it."""
    verdict, why = _decide(claim, measured, setting)
    found = measured or Measured(claim.id, None)
    return Verdict(
        claim.id, claim.text, claim.kind, claim.unit, claim.source, claim.headline, claim.value, claim.at_least,
        claim.at_most, claim.tolerance, found.value, found.low, found.high, found.n, found.simulated, verdict, why,
        found.aside,
    )  # fmt: skip


def judge_all(experiment_id: str, measured: Iterable[Measured], setting: Setting) -> list[Verdict]:
    """A verdict on every claim of an experiment, in the order of claims.toml.

    Raises:
        ValueError: a measured value belongs to no claim of the experiment.
    """
    by_id = {found.id: found for found in measured}
    claims = claims_of(experiment_id)
    unknown = sorted(by_id.keys() - {claim.id for claim in claims})
    if unknown:
        raise ValueError(f"no claim {', '.join(unknown)} in artifacts/claims.toml")
    return [judge(claim, by_id.get(claim.id), setting) for claim in claims]
