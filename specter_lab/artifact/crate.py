"""The RO-Crate of a package: what every file of a result is, and the run that made it (Process Run Crate 0.5).

One CreateAction per recorded run, filled from its provenance.json: command, machine, inputs with their hashes, outputs,
start and end, and the versions of the packages in use.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from rocrate.model import ContextEntity
from rocrate.rocrate import ROCrate

import specter_lab
from specter_lab import paths
from specter_lab.artifact.citation import NAME, about
from specter_lab.artifact.ledger import recorded
from specter_lab.artifact.papers import papers
from specter_lab.experiments.registry import EXPERIMENTS
from specter_lab.experiments.results import MARKER, Result

METADATA = "ro-crate-metadata.json"
PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
TERMS = "https://w3id.org/ro/terms/workflow-run/context"
LICENCE = "https://spdx.org/licenses/Apache-2.0"
OTHER = "application/octet-stream"
FORMATS = {
    ".csv": "text/csv", ".json": "application/json", ".png": "image/png", ".svg": "image/svg+xml",
    ".ipynb": "application/x-ipynb+json", ".gz": "application/gzip",
}  # fmt: skip


def crate_json(published: datetime, results: Sequence[Result] | None = None) -> str:
    """Content of ro-crate-metadata.json for a package of `published`; the same results give the same bytes.

    Args:
        published: of the package, with its time zone.
        results: the runs it describes (default: all recorded ones).
    """
    project = about()
    crate = ROCrate(version="1.1")  # what the profile builds on
    crate.name = f"{NAME} {specter_lab.__version__}"
    crate.description = project["description"]
    crate.datePublished = published
    crate.license = crate.add(
        ContextEntity(crate, LICENCE, {"@type": "CreativeWork", "name": project["license"]["text"]})
    )
    crate.metadata.extra_contexts.append(TERMS)
    crate.root_dataset["conformsTo"] = _profile(crate)
    crate.root_dataset["citation"] = [_paper(crate, url=paper.url, title=paper.title) for paper in papers().values()]
    agent = crate.add(_entity(crate, "#authors", "Organization", name=project["authors"][0]["name"]))
    crate.root_dataset["author"] = agent
    if results is None:
        results = [result for experiment_id in EXPERIMENTS for result in recorded(experiment_id)]
    crate.root_dataset["mentions"] = [_run(crate, result, agent) for result in results]
    with TemporaryDirectory() as folder:
        crate.metadata.write(folder)
        content = json.loads((Path(folder) / METADATA).read_text(encoding="utf-8"))
    content["@graph"].sort(key=lambda entity: (entity["@id"] != METADATA, entity["@id"] != "./", entity["@id"]))
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _entity(crate: ROCrate, identifier: str, kind: str, **properties: object) -> ContextEntity:
    return ContextEntity(crate, identifier, {"@type": kind, **properties})


def _profile(crate: ROCrate) -> ContextEntity:
    return crate.add(_entity(crate, PROFILE, "CreativeWork", name="Process Run Crate", version="0.5"))


def _paper(crate: ROCrate, url: str, title: str) -> ContextEntity:
    return crate.add(_entity(crate, url, "ScholarlyArticle", name=title))


def _run(crate: ROCrate, result: Result, agent: ContextEntity) -> ContextEntity:
    """The action of one run, with everything it refers to."""
    origin = result.provenance
    name = f"{result.experiment}-{result.tier}"
    action = _entity(
        crate,
        f"#run-{name}",
        "CreateAction",
        name=f"{result.experiment}, {result.tier} tier: {EXPERIMENTS[result.experiment].title}",
        description=origin["command"],
        startTime=_start(origin),
        endTime=origin["finished"],
        actionStatus="http://schema.org/CompletedActionStatus",
    )
    crate.add(action)
    action["agent"] = agent
    action["instrument"] = _tool(crate, origin)
    action["object"] = [*_inputs(crate, origin), *_conditions(crate, name, origin)]
    action["result"] = [_output(crate, result, file) for file in (*origin["files"], MARKER)]
    return action


def _start(origin: dict) -> str:
    """A run's start: its end less the seconds it took."""
    return (datetime.fromisoformat(origin["finished"]) - timedelta(seconds=origin["wall_s"])).isoformat(
        timespec="seconds"
    )


def _tool(crate: ROCrate, origin: dict) -> ContextEntity:
    """This software as it was for the run: its commit (or the hash of its measuring code) and the packages it stood on."""
    version = origin["commit"] or f"code sha256 {origin['code_sha256']}"
    tool = _entity(
        crate, f"#{NAME}-{version.split()[-1]}", "SoftwareApplication", name=NAME, url="./README.md", version=version
    )
    tool = crate.add(tool)
    tool["softwareRequirements"] = [
        crate.add(_entity(crate, f"#{name}-{number}", "SoftwareApplication", name=name, version=number))
        for name, number in origin["packages"].items()
    ]
    return tool


def _inputs(crate: ROCrate, origin: dict) -> list[ContextEntity]:
    """What was read, with its sha256: files and folders of the package where it has them, values where it does not."""
    found = []
    for name, digest in origin["inputs"].items():
        if (paths.ZOO / name).is_dir():
            place, kind = f"data/zoo/{name}/", "Dataset"
        elif folder := next(
            (folder for folder in ("prompts", "calibration") if (paths.DATA / folder / name).is_file()), None
        ):
            place, kind = f"data/{folder}/{name}", "File"
        else:
            identifier = f"#{name.replace(' ', '_')}-{digest[:16]}"
            found.append(
                crate.add(_entity(crate, identifier, "PropertyValue", name=name, propertyID="sha256", value=digest))
            )
            continue
        found.append(_data(crate, place, kind, name=name, sha256=digest))
    return found


def _conditions(crate: ROCrate, name: str, origin: dict) -> list[ContextEntity]:
    """Machine, seed, tier and memory: what else decided how the run went."""
    machine = ", ".join(f"{key}: {value}" for key, value in origin["machine"].items() if value is not None)
    values = {
        "machine": machine,
        "seed": origin["seed"],
        "tier": origin["tier"],
        "peak memory in GiB": origin.get("peak_process_gib"),
    }
    return [
        crate.add(_entity(crate, f"#{key.replace(' ', '-')}-of-{name}", "PropertyValue", name=key, value=value))
        for key, value in values.items()
        if value is not None
    ]  # fmt: skip


def _output(crate: ROCrate, result: Result, file: str) -> ContextEntity:
    path = result.folder / file
    properties = {
        "name": file,
        "contentSize": str(path.stat().st_size),
        "encodingFormat": FORMATS.get(path.suffix, OTHER),
    }
    if file in result.provenance["files"]:
        properties["sha256"] = result.provenance["files"][file]
    return _data(crate, path.relative_to(paths.ROOT).as_posix(), "File", **properties)


def _data(crate: ROCrate, place: str, kind: str, **properties: object) -> ContextEntity:
    """A data entity that lies in the package already: described, not copied; part of the root."""
    if known := crate.dereference(place):
        return known
    entity = crate.add(_entity(crate, place, kind, **properties))
    crate.root_dataset.append_to("hasPart", entity)
    return entity
