"""The archive, what describes it, and what finds it altered."""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from specter_lab import paths
from specter_lab.artifact import package, sums, verify
from specter_lab.artifact.crate import PROFILE, crate_json
from specter_lab.artifact.ledger import recorded
from specter_lab.errors import UserError
from specter_lab.experiments.registry import EXPERIMENTS

DAY = datetime(2026, 12, 1, 12, tzinfo=UTC)
FILES = {"b/two.txt": b"two\n", "one.sh": b"#!/bin/sh\n"}


@pytest.fixture(scope="module")
def graph():
    """The entities of the project's own crate, by id."""
    return {entity["@id"]: entity for entity in json.loads(crate_json(DAY))["@graph"]}


def test_an_archive_is_the_same_bytes_whenever_and_in_whatever_order_it_is_made():
    made = package.packed(FILES, {"one.sh"}, DAY)
    assert made == package.packed(dict(reversed(FILES.items())), {"one.sh"}, DAY)
    with tarfile.open(fileobj=io.BytesIO(made)) as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == [f"{package.FOLDER}/{name}" for name in sorted(FILES)]
    assert {(member.uid, member.gid, member.uname, member.mtime) for member in members} == {
        (0, 0, "", int(DAY.timestamp()))
    }
    assert [member.mode for member in members] == [0o644, 0o755]


def test_sums_are_what_sha256sum_checks(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    listing = tmp_path / sums.NAME
    listing.write_text(sums.sums_of(FILES))
    subprocess.run(["sha256sum", "--check", "--strict", sums.NAME], cwd=tmp_path, check=True, capture_output=True)
    assert sums.altered(listing) == []
    (tmp_path / "one.sh").write_bytes(b"other")
    (tmp_path / "b" / "two.txt").unlink()
    assert sums.altered(listing) == ["b/two.txt is missing", "one.sh is altered"]
    listing.write_text("no sum\n")
    with pytest.raises(UserError, match="SHA256SUMS is damaged at 'no sum'"):
        sums.altered(listing)


def test_a_package_is_made_of_a_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    with pytest.raises(UserError, match="no git checkout"):
        package.package(tmp_path / "out")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    for name in ("new.txt", "store"):  # a store of yours is not of the commit, and in nobody's way
        (tmp_path / name).write_text("not committed")
    subprocess.run(["git", "add", "new.txt"], cwd=tmp_path, check=True)
    with pytest.raises(UserError, match=r"1 files differ from the commit \(new.txt\)"):
        package.package(tmp_path / "out")
    (tmp_path / "inside").mkdir()
    monkeypatch.setattr(paths, "ROOT", tmp_path / "inside")  # unpacked inside another repository
    with pytest.raises(UserError, match="no git checkout"):
        package.package(tmp_path / "out")


def test_the_crate_has_one_action_per_recorded_run(graph):
    runs = [result for name in EXPERIMENTS for result in recorded(name)]
    actions = {name: entity for name, entity in graph.items() if entity["@type"] == "CreateAction"}
    assert actions.keys() == {f"#run-{run.experiment}-{run.tier}" for run in runs} and runs
    for run in runs:
        action = actions[f"#run-{run.experiment}-{run.tier}"]
        origin = run.provenance
        assert action["description"] == origin["command"] and action["endTime"] == origin["finished"]
        took = datetime.fromisoformat(action["endTime"]) - datetime.fromisoformat(action["startTime"])
        assert took.total_seconds() == pytest.approx(origin["wall_s"], abs=1)
        outputs = {graph[output["@id"]]["name"]: graph[output["@id"]] for output in action["result"]}
        assert outputs.keys() == {*origin["files"], "provenance.json"}
        assert all(outputs[name]["sha256"] == digest for name, digest in origin["files"].items())
        told = {graph[item["@id"]]["name"]: graph[item["@id"]] for item in action["object"]}
        assert {**origin["inputs"]}.keys() <= told.keys()
        assert (origin["machine"]["gpu"] or origin["machine"]["cpu"]) in told["machine"]["value"]
        tool = graph[action["instrument"]["@id"]]
        assert tool["@type"] == "SoftwareApplication" and tool["version"]


def test_the_crate_is_what_the_profile_asks_for(graph):
    root = graph["./"]
    assert root["conformsTo"] == {"@id": PROFILE} and graph[PROFILE]["@type"] == "CreativeWork"
    assert graph["ro-crate-metadata.json"]["conformsTo"] == {"@id": "https://w3id.org/ro/crate/1.1"}
    assert {name for name, entity in graph.items() if entity["@type"] == "CreateAction"} == {
        run["@id"] for run in root["mentions"]
    }
    parts = {part["@id"] for part in root["hasPart"]}
    files = {name for name, entity in graph.items() if entity["@type"] in ("File", "Dataset")} - {"./"}
    assert parts == files and all((paths.ROOT / name).exists() for name in files)
    for entity in graph.values():
        for value in entity.values():
            for link in value if isinstance(value, list) else [value]:
                if isinstance(link, dict) and link["@id"] != "https://w3id.org/ro/crate/1.1":
                    assert link["@id"] in graph
    assert crate_json(DAY) == crate_json(DAY)


@pytest.fixture
def altered(tmp_path):
    """A copy of a recorded result to spoil: its rows and claims with hashes that fit."""
    root = tmp_path / "recorded"
    shutil.copytree(paths.RECORDED / "specter-memory", root / "specter-memory")

    def spoil(name, change):
        folder = root / "specter-memory" / "cpu"
        (folder / name).write_text(change((folder / name).read_text()))
        marker = json.loads((folder / "provenance.json").read_text())
        marker["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        (folder / "provenance.json").write_text(json.dumps(marker))
        return recorded("specter-memory", root)[0]

    return spoil


def test_rows_of_another_version_are_one_sentence():
    (result,) = recorded("specter-table1")
    (said,) = verify.other_verdicts(replace(result, rows=result.rows.drop(columns="notes")))
    assert said == "its rows are not those that today's code reads ('notes'): run it again"


def test_recorded_verdicts_are_those_of_their_rows_and_of_todays_claims():
    for experiment_id in EXPERIMENTS:
        for result in recorded(experiment_id):
            assert verify.other_verdicts(result) == verify.incomplete(result) == [], experiment_id


def test_a_verdict_that_its_rows_do_not_bear_is_found(altered):
    better = altered("claims.json", lambda text: text.replace('"verdict": "reproduced"', '"verdict": "trend"', 1))
    assert verify.other_verdicts(better) == ["specter-memory/independent@draft: verdict trend is now reproduced"]


def test_rows_that_were_changed_are_found(altered):
    def double(text):
        lines = text.splitlines()
        assert lines[1].startswith("Qwen1.5-MoE-A2.7B,counted,top-k experts,12288,independent,6561533952.0,")
        return "\n".join([lines[0], lines[1].replace("6561533952.0", "9561533952.0"), *lines[2:], ""])

    found = verify.other_verdicts(altered("rows.csv", double))
    assert any("specter-memory/independent@draft: ours 6.1109" in problem for problem in found)


def test_a_result_that_is_not_whole_and_one_without_origin_are_found(tmp_path):
    shutil.copytree(paths.RECORDED / "specter-memory", tmp_path / "specter-memory")
    assert verify.broken(tmp_path) == []
    (whole,) = recorded("specter-memory", tmp_path)
    (tmp_path / "specter-memory" / "cpu" / "rows.csv").write_text("model\n")
    assert [problem.endswith("is altered or of another version") for problem in verify.broken(tmp_path)] == [True]
    bare = replace(whole, provenance={key: value for key, value in whole.provenance.items() if key != "machine"})
    assert verify.incomplete(bare) == ["provenance has no machine"]
    dirty = replace(whole, provenance=whole.provenance | {"uncommitted_changes": True})
    with pytest.raises(UserError, match="differed from its commit, so its code cannot be looked up"):
        verify.uncommitted(dirty)


def test_other_weights_are_found(monkeypatch):
    (result,) = recorded("specter-memory")
    assert verify.other_inputs(result) == []
    monkeypatch.setattr("specter_lab.experiments.specter.memory.model_digest", lambda name: "0" * 64)
    assert verify.other_inputs(result) == [
        f"{name} is another one now" for name in ("qwen-nano", "phi-nano", "deepseek-nano")
    ]


def test_verify_says_so_and_fails(monkeypatch, capsys):
    checks = [verify.Check("this", ()), verify.Check("that", ("it is altered",), ("x, gpu: not here",))]
    monkeypatch.setattr(verify, "checks", lambda: iter(checks))
    assert verify.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok    this", "WRONG that", "      it is altered", "      not looked at: x, gpu: not here", "1 checks failed",
    ]  # fmt: skip
