"""Generated documents are what would be generated now, and say the same of the same thing."""

import json
import re
from dataclasses import replace

import pytest
import yaml

import specter_lab
from specter_lab import paths
from specter_lab.artifact import documents, house, ledger, papers
from specter_lab.artifact.appendix import appendix
from specter_lab.artifact.citation import about, citation_cff, zenodo_json
from specter_lab.errors import UserError
from specter_lab.experiments.claims import claims_of, read_claims
from specter_lab.experiments.registry import EXPERIMENTS

SECTIONS = ["Abstract", "Check-list", "Description", "Installation", "Experiment workflow", "Evaluation and expected results",
            "Customization", "Notes"]  # fmt: skip


def test_no_document_is_out_of_date():
    assert not documents.stale(), "run `make documents`"


def test_a_changed_claim_is_noticed(monkeypatch, tmp_path):
    text = paths.CLAIMS.read_text(encoding="utf-8")
    claims = tmp_path / "claims.toml"
    claims.write_text(text.replace("value = 0.9296", "value = 0.9", 1), encoding="utf-8")
    assert claims.read_text() != text
    monkeypatch.setattr(paths, "CLAIMS", claims)
    assert documents.APPENDICES / "specter.md" in documents.stale()


def test_citation_and_deposit_agree():
    cff, deposit = yaml.safe_load(citation_cff()), json.loads(zenodo_json())
    assert cff["version"] == deposit["version"] == specter_lab.__version__
    assert cff["abstract"] == deposit["description"] == about()["description"]
    assert cff["license"].lower() == deposit["license"]
    assert [author["name"] for author in cff["authors"]] == [creator["name"] for creator in deposit["creators"]]
    assert cff["keywords"] == deposit["keywords"]
    cited = [paper["url"] for paper in cff["references"]]
    assert cited == [related["identifier"] for related in deposit["related_identifiers"]] and len(cited) == 3


def test_every_experiment_belongs_to_a_paper():
    for name in [*EXPERIMENTS, *(claim_id.split("/")[0] for claim_id in read_claims(paths.CLAIMS))]:
        assert papers.paper_of(name)
    with pytest.raises(UserError, match="no paper 'nobody' in papers.toml"):
        papers.paper_of("nobody-knows")


@pytest.mark.parametrize("paper", papers.papers().values(), ids=lambda paper: paper.prefix)
def test_an_appendix_is_complete_and_about_two_pages(paper):
    text = appendix(paper)
    assert re.findall(r"^## A\.\d (.+)$", text, flags=re.MULTILINE) == SECTIONS
    for claim in read_claims(paths.CLAIMS).values():
        if claim.headline and claim.id.startswith(paper.prefix):
            assert f" {claim.text.replace('|', chr(92) + '|')} |" in text
    for row in EXPERIMENTS.values():
        assert (f"`reproduce-{(*row.aliases, row.id)[0]}`" in text) == (row.id.split("-")[0] == paper.prefix)
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert 300 < sum(len(line.split()) for line in prose) < 900


def test_the_ledger_has_every_claim_and_prefers_what_was_measured():
    entries = ledger.ledger()
    assert {entry.claim.id for entry in entries} == read_claims(paths.CLAIMS).keys()
    kernel = [entry for entry in entries if entry.experiment_id == "specter-kernel"]
    assert {entry.result.tier for entry in kernel} == {"gpu"}
    for entry in entries:
        assert (entry.verdict is None) == (entry.result is None)
        assert entry.said and entry.why


def test_allowed_variation_is_the_rule_that_judges():
    """The bounds in words are those at which a verdict changes."""
    from specter_lab.experiments.claims import Setting, judge
    from specter_lab.experiments.context import Measured

    claim = replace(claims_of("specter-table1")[0], kind="absolute", value=1.0, tolerance=0.02, any_weights=True)
    assert ledger.allowed(claim) == "± 2 %, trend: ± 6 %"
    said = [
        judge(claim, Measured(claim.id, value), Setting("cpu")).verdict for value in (1.0199, 1.0201, 1.0599, 1.0601)
    ]
    assert said == ["reproduced", "trend", "trend", "not reproduced"]


def test_a_guide_without_its_markers_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(house, "GUIDE", tmp_path / "CONTRIBUTING.md")
    with pytest.raises(UserError, match="CONTRIBUTING.md has no lines"):
        house.with_map()
    bare = paths.ROOT / "bare.py"
    monkeypatch.setattr(house.Path, "read_text", lambda self, encoding: "x = 1")
    with pytest.raises(UserError, match="bare.py says nothing about itself"):
        house.summary(bare)
