"""The artifact appendix of a paper, in the structure that ACM's artifact evaluation asks for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specter_lab.artifact.citation import about
from specter_lab.artifact.ledger import Entry, allowed, ledger, recorded
from specter_lab.artifact.papers import Paper
from specter_lab.experiments.claims import NOT_RUN
from specter_lab.experiments.compare import NOTHING, our_value, papers_value
from specter_lab.experiments.registry import EXPERIMENTS, Experiment

DISK = "4 GB"  # of .venv, as README.md says
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, keep_trailing_newline=True,
    autoescape=lambda name: name is not None and ".html" in name,
)  # fmt: skip


def appendix(paper: Paper) -> str:
    """The whole appendix of one paper as Markdown; everything that can change comes from registry, claims and results."""
    entries = [entry for entry in ledger() if entry.paper == paper]
    experiments = [row for row in EXPERIMENTS.values() if row.id.split("-")[0] == paper.prefix]
    numbers = {row.id: f"E{number}" for number, row in enumerate(experiments, start=1)}
    on_cpu = [row for row in experiments if row.minutes.get("cpu")]
    first = min(on_cpu, key=lambda row: row.minutes["cpu"], default=None)
    runs = [result.provenance for row in experiments for result in recorded(row.id)]
    missing = sorted({entry.experiment_id for entry in entries if entry.experiment is None})
    return TEMPLATES.get_template("appendix.md.j2").render(
        paper=paper,
        claims=len({entry.claim.id for entry in entries}),
        headline=len({entry.claim.id for entry in entries if entry.claim.headline}),
        tally=_tally(entries),
        disk=DISK,
        licence=about()["license"]["text"],
        cpu_count=len(on_cpu),
        cpu_minutes=sum(row.minutes["cpu"] for row in on_cpu),
        gpus=", ".join(sorted({run["machine"]["gpu"] for run in runs} - {None})),
        peak=_peak([run for run in runs if not run["machine"]["gpu"]]),
        first=first and {"target": _target(first), "minutes": first.minutes["cpu"]},
        experiments=[_experiment(row, numbers[row.id]) for row in experiments],
        missing=", ".join(f"`{name}`" for name in missing),
        rows=_claims([entry for entry in entries if entry.claim.headline], numbers),
    )


def _peak(runs: list[dict]) -> str:
    """The most memory that a process of these runs held; empty where none says."""
    peaks = [run["peak_process_gib"] for run in runs if "peak_process_gib" in run]
    return f"{max(peaks):.1f} GiB" if peaks else ""


def _tally(entries: list[Entry]) -> str:
    """How many claims have which verdict; a claim judged on several tiers counts once, on the first."""
    by_claim = {entry.claim.id: entry.said for entry in reversed(entries)}
    counted = Counter(by_claim.values())
    return ", ".join(f"{count} {verdict}" for verdict, count in counted.most_common()) or f"0 {NOT_RUN}"


def _target(row: Experiment) -> str:
    return f"reproduce-{(*row.aliases, row.id)[0]}"


def _experiment(row: Experiment, number: str) -> dict[str, str]:
    """One line of the table of experiments; minutes, memory and bytes as the recorded runs have them."""
    results = recorded(row.id)
    sizes = [sum(file.stat().st_size for file in result.folder.iterdir()) for result in results]
    return {
        "number": number,
        "title": row.title,
        "target": _target(row),
        "minutes": ", ".join(f"{tier}: {row.minutes[tier] or '?'}" for tier in row.tiers),
        "recorded": "; ".join(_recorded(result.provenance) for result in results) or NOTHING,
        "memory": "; ".join(_peak([result.provenance]) or "?" for result in results) or NOTHING,
        "size": "; ".join(f"{size / 1e6:.1f} MB" for size in sizes) or NOTHING,
    }  # fmt: skip


def _recorded(run: dict) -> str:
    beside = ", beside others" if run.get("beside_others") else ""
    return f"{run['wall_s']:.0f} s on {_machine(run['machine'])}{beside}"


def _machine(machine: dict) -> str:
    return machine["gpu"] or f"{machine['cores']} cores"


def _claims(entries: list[Entry], numbers: dict[str, str]) -> list[dict[str, str]]:
    """Lines of the table of claims. The points of one series share their number."""
    series: dict[str, int] = {}
    lines = []
    for entry in entries:
        number = series.setdefault(entry.claim.id.split("@")[0], len(series) + 1)
        tier = f" ({entry.result.tier})" if entry.result and entry.result.tier != "cpu" else ""
        lines.append(
            {
                "number": f"C{number}",
                "text": _cell(entry.claim.text),
                "experiment": numbers.get(entry.experiment_id, NOTHING) + tier,
                "paper": papers_value(entry.claim),
                "allowed": allowed(entry.claim),
                "ours": our_value(entry.verdict),
                "verdict": entry.said,
            }
        )
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
