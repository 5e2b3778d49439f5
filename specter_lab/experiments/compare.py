"""Paper beside recorded beside yours: the table at the end of a run, in notebooks and in README.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.experiments import results
from specter_lab.experiments.claims import NOT_RUN, VERDICTS, Claim, Verdict, claims_of
from specter_lab.experiments.registry import EXPERIMENTS
from specter_lab.files import write_whole

BEGIN, END = "<!-- claims:begin -->", "<!-- claims:end -->"
NOTHING = "-"


def comparison(experiment: str, tier: str) -> pd.DataFrame:
    """One row per claim, columns claim, paper, recorded, yours, verdict, why.

    The verdict is on your result if there is one, else on the recorded one.
    """
    columns = {root: _verdicts(experiment, tier, root) for root in (paths.RECORDED, paths.RESULTS)}
    table = []
    for claim in claims_of(experiment):
        recorded, yours = (verdicts.get(claim.id) for verdicts in columns.values())
        shown = yours or recorded
        table.append(
            {
                "claim": claim.text,
                "paper": papers_value(claim),
                "recorded": our_value(recorded),
                "yours": our_value(yours),
                "verdict": shown.verdict if shown else NOT_RUN,
                "why": shown.why if shown else "nobody has run it yet",
            }
        )
    return pd.DataFrame(table, columns=["claim", "paper", "recorded", "yours", "verdict", "why"])


def headline_table() -> pd.DataFrame:
    """One row per experiment, from recorded results: its first headline claim, and how many of all its claims got which verdict.

    Experiments that need a GPU are listed once they have been recorded on one.
    """
    table = []
    for experiment in EXPERIMENTS.values():
        tier, claims = experiment.tiers[0], claims_of(experiment.id)
        recorded = _verdicts(experiment.id, tier, paths.RECORDED)
        if tier != "cpu" and not recorded:
            continue
        claim = next(claim for claim in claims if claim.headline)
        found = recorded.get(claim.id)
        command = (
            f"`make reproduce-{(*experiment.aliases, experiment.id)[0]}{'' if tier == 'cpu' else f' TIER={tier}'}`"
        )
        aside = f"; {found.aside}" if found and found.aside else ""
        counts = Counter(recorded[claim.id].verdict if claim.id in recorded else NOT_RUN for claim in claims)
        table.append({
            "claim": claim.text, "command": command, "paper": papers_value(claim), "ours": our_value(found) + aside,
            "verdict": found.verdict if found else NOT_RUN,
            "all its claims": ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]),
        })  # fmt: skip
    return pd.DataFrame(table, columns=["claim", "command", "paper", "ours", "verdict", "all its claims"])


def markdown(table: pd.DataFrame) -> str:
    """A table as Markdown."""
    lines = ["| " + " | ".join(table.columns) + " |", "|" + " --- |" * len(table.columns)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in table.values]
    return "\n".join(lines)


def update_readme(readme: Path = paths.ROOT / "README.md") -> None:
    """Replace the claims table between its markers.

    Raises:
        UserError: the file has lost its markers.
    """
    text = readme.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise UserError(f"{readme.name} has no lines '{BEGIN}' and '{END}': put them back where the table belongs")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    write_whole(readme, f"{before}{BEGIN}\n{markdown(headline_table())}\n{END}{after}".encode())


def in_unit(value: float | None, unit: str) -> str:
    """A number as people read it: shares in percent, factors with an x."""
    if value is None:
        return NOTHING
    suffix = {"share": " %", "pairs": " % of pairs", "x": "x"}.get(unit, f" {unit}")
    return _digits(value, unit) + suffix


def _digits(value: float, unit: str) -> str:
    if unit == "share":
        return f"{100 * value:.2f}"
    if unit == "pairs":
        return f"{100 * value:.0f}"
    return f"{value:.3g}" if unit == "x" else f"{value:.4g}"


def _verdicts(experiment: str, tier: str, root: Path) -> dict[str, Verdict]:
    result = results.read(experiment, tier, root)
    return {verdict.id: verdict for verdict in result.verdicts} if result else {}


def papers_value(claim: Claim) -> str:
    """What a paper says of a claim: its number, its bound, or an order."""
    if claim.kind == "ordering":
        return "in this order"
    if claim.value is not None:
        return in_unit(claim.value, claim.unit)
    low, high = (in_unit(bound, claim.unit) for bound in (claim.at_least, claim.at_most))
    if claim.at_least is None and claim.at_most is None:
        return NOTHING
    return f">= {low}" if claim.at_most is None else f"<= {high}" if claim.at_least is None else f"{low} to {high}"


def our_value(verdict: Verdict | None) -> str:
    """What was found, with interval and n, and whether it is simulated."""
    if verdict is None:
        return NOTHING
    shown = in_unit(verdict.ours, verdict.unit)
    if verdict.low is not None and verdict.high is not None:
        shown += f" [{_digits(verdict.low, verdict.unit)}, {_digits(verdict.high, verdict.unit)}]"
    if verdict.ours is not None and verdict.n is not None:
        shown += f", n = {verdict.n:,}"
    return shown + (" (simulated)" if verdict.simulated else "")
