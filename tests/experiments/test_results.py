"""A result is whole or it is not there: writers are killed, disks fill up, files are altered."""

import json
import os
import random
import signal
import time

import pandas as pd
import pytest
from matplotlib.figure import Figure

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.experiments import results
from specter_lab.experiments.claims import Claim, Setting, judge
from specter_lab.experiments.context import Measured


def content(version: int):
    """Rows, verdicts, figure and provenance that all carry one version number."""
    rows = pd.DataFrame({"version": [version] * 50, "value": [version + 1 / 3] * 50})
    claim = Claim("e/c", "t", "threshold", "x", "S", at_least=0.0)
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([0, version])
    return rows, [judge(claim, Measured("e/c", float(version)), Setting("cpu"))], figure, {"version": version}


def latest(experiment, tier):
    """Yours, else the recorded one."""
    return results.read(experiment, tier, paths.RESULTS) or results.read(experiment, tier, paths.RECORDED)


def versions(result):
    return {*result.rows["version"], int(result.verdicts[0].ours), result.provenance["version"]}


def notebook(path, text="hello"):
    timed = {"papermill": {"duration": 1.0}}
    cell = {"cell_type": "code", "source": text, "outputs": [], "execution_count": 1, "id": "a", "metadata": timed}
    path.write_text(json.dumps({"cells": [cell], "metadata": timed, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_what_is_written_is_read_back_exactly(out):
    rows, verdicts, figure, provenance = content(1)
    result = results.write("e", "cpu", rows, verdicts, figure, provenance)
    pd.testing.assert_frame_equal(result.rows, rows)
    assert (result.verdicts, result.origin) == (tuple(verdicts), "yours")
    assert set(os.listdir(result.folder)) == {
        "rows.csv", "claims.json", "figure.png", "figure.svg", "provenance.json"
    }  # fmt: skip
    assert os.listdir(result.folder.parent) == ["cpu"]


def test_the_same_content_gives_the_same_bytes(out):
    first = {file.name: file.read_bytes() for file in results.write("e", "cpu", *content(1)).folder.iterdir()}
    second = {file.name: file.read_bytes() for file in results.write("e", "cpu", *content(1)).folder.iterdir()}
    assert first == second


def test_a_writer_killed_at_any_moment_leaves_a_whole_result(out):
    """Twenty writers are killed with SIGKILL while they replace a result over and over."""
    begin = time.monotonic()
    results.write("e", "cpu", *content(0))
    write_s = time.monotonic() - begin
    dice, newest = random.Random(0), 0
    for _ in range(20):
        child = os.fork()
        if child == 0:
            prepared = [content(version) for version in (newest + 1, newest + 2)]
            while True:
                for each in prepared:
                    results.write("e", "cpu", *each)
        time.sleep(write_s * (2 + 3 * dice.random()))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = versions(latest("e", "cpu"))
        assert len(found) == 1
        newest = found.pop()
    assert newest > 0


@pytest.mark.parametrize("state", ["new is half-written", "between the two renames", "old not yet removed"])
def test_every_state_a_kill_can_leave_is_settled(out, state):
    place = results.write("e", "cpu", *content(1)).folder
    newer = results.write("elsewhere", "cpu", *content(2)).folder
    if state == "new is half-written":
        (newer / "provenance.json").unlink()
        newer.rename(place.with_name(".cpu.new"))
    else:
        place.rename(place.with_name(".cpu.old"))
        newer.rename(place.with_name(".cpu.new") if state == "between the two renames" else place)
    assert versions(latest("e", "cpu")) == ({1} if state == "new is half-written" else {2})
    assert versions(results.write("e", "cpu", *content(3))) == {3}
    assert os.listdir(place.parent) == ["cpu"]


@pytest.mark.parametrize("damage", ["no marker", "truncated rows", "altered claims", "missing figure"])
def test_a_damaged_result_is_no_result(out, damage):
    folder = results.write("e", "cpu", *content(1)).folder
    if damage == "no marker":
        (folder / "provenance.json").unlink()
    elif damage == "truncated rows":
        (folder / "rows.csv").write_bytes((folder / "rows.csv").read_bytes()[:-5])
    elif damage == "altered claims":
        (folder / "claims.json").write_text((folder / "claims.json").read_text().replace("reproduced", "trend"))
    else:
        (folder / "figure.png").unlink()
    assert latest("e", "cpu") is None


def test_yours_comes_before_recorded(out, tmp_path):
    assert latest("e", "cpu") is None
    mine = results.write("e", "cpu", *content(1))
    with pytest.raises(UserError, match="make reproduce-e"):
        results.record("e", "cpu")
    results.add_notebook(mine, notebook(tmp_path / "n.ipynb"))
    assert results.record("e", "cpu").origin == "recorded"
    results.write("e", "cpu", *content(2))
    assert versions(latest("e", "cpu")) == {2}
    (paths.RESULTS / "e" / "cpu" / "rows.csv").unlink()
    recorded = latest("e", "cpu")
    assert (recorded.origin, versions(recorded)) == ("recorded", {1})


def test_the_notebook_carries_no_paths_and_times_of_this_machine(out, tmp_path):
    executed = notebook(tmp_path / "n.ipynb", text=f"{paths.ROOT}/specter_lab/x.py:1: UserWarning")
    result = results.add_notebook(results.write("e", "cpu", *content(1)), executed)
    text = (result.folder / "notebook.ipynb").read_text()
    assert "./specter_lab/x.py" in text and str(paths.ROOT) not in text and "papermill" not in text
    assert versions(latest("e", "cpu")) == {1}


def test_a_result_has_its_limits(out):
    rows, *rest = content(1)
    with pytest.raises(UserError, match="rows.csv has 1,.*: ask for fewer models"):
        results.write("e", "cpu", pd.concat([rows] * 1200), *rest)
    assert latest("e", "cpu") is None


def test_two_runs_of_the_same_question_do_not_disturb_each_other(out, tmp_path):
    *rest, provenance = content(1)
    first = results.write("e", "cpu", *rest, provenance | {"question": "q", "finished": 1})
    results.write("e", "cpu", *rest, provenance | {"question": "q", "finished": 2})
    kept = results.add_notebook(first, notebook(tmp_path / "n.ipynb"))
    assert kept.provenance["finished"] == 2 and (kept.folder / "notebook.ipynb").exists()
    results.write("e", "cpu", *rest, provenance | {"question": "another"})
    with pytest.raises(UserError, match="another run replaced cpu of e: run the command again"):
        results.add_notebook(first, notebook(tmp_path / "n.ipynb"))


@pytest.mark.parametrize("marker", ["", "[]", "null", '{"files": 7}', '{"files": {"": "x"}}'])
def test_a_damaged_marker_is_no_result(out, marker):
    folder = results.write("e", "cpu", *content(1)).folder
    (folder / "provenance.json").write_text(marker)
    assert latest("e", "cpu") is None
