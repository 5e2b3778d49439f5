"""CITATION.cff and .zenodo.json: pyproject.toml says what this software is, artifacts/papers.toml what it checks."""

from __future__ import annotations

import json
import tomllib

import specter_lab
from specter_lab import paths
from specter_lab.artifact.papers import papers

NAME = "specter_lab"
ASK = "If you use this software, please cite it as below, together with the papers whose claims it checks."


def about() -> dict:
    """The `project` table of pyproject.toml."""
    return tomllib.loads((paths.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def citation_cff() -> str:
    """Content of CITATION.cff (Citation File Format 1.2.0); every string is quoted as JSON, which YAML reads."""
    project = about()
    lines = [
        "# Generated from pyproject.toml and artifacts/papers.toml by `make documents`.",
        "cff-version: 1.2.0",
        f"message: {_quoted(ASK)}",
        f"title: {NAME}",
        f"abstract: {_quoted(project['description'])}",
        "type: software",
        f"version: {specter_lab.__version__}",
        f"license: {project['license']['text']}",
        "keywords:",
        *(f"  - {_quoted(word)}" for word in project["keywords"]),
        "authors:",
        *(f"  - name: {_quoted(author['name'])}" for author in project["authors"]),
        "references:",
    ]
    for paper in papers().values():
        lines += [
            "  - type: article",
            f"    title: {_quoted(paper.title)}",
            "    authors:",
            f"      - name: {_quoted(paper.authors)}",
            f"    url: {paper.url}",
        ]
    return "\n".join(lines) + "\n"


def zenodo_json() -> str:
    """Content of .zenodo.json: the metadata of a deposit."""
    project = about()
    deposit = {
        "title": f"{NAME} {specter_lab.__version__}",
        "description": project["description"],
        "upload_type": "software",
        "version": specter_lab.__version__,
        "license": project["license"]["text"].lower(),
        "access_right": "open",
        "creators": [{"name": author["name"]} for author in project["authors"]],
        "keywords": project["keywords"],
        "related_identifiers": [
            {"identifier": paper.url, "relation": "isSupplementTo", "resource_type": "publication-article"}
            for paper in papers().values()
        ],
    }
    return json.dumps(deposit, indent=1, ensure_ascii=False) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
