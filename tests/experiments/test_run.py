"""A toy experiment from the command to the executed notebook, and what the command line says when it cannot."""

import json
import multiprocessing
import shutil
import subprocess
import sys
from dataclasses import replace

import nbformat
import pandas as pd
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from specter_lab import paths
from specter_lab.cli import main
from specter_lab.errors import UserError
from specter_lab.experiments import compare, jobs, provenance, results, runner
from specter_lab.experiments.registry import find
from specter_lab.experiments.run import load_or_run, run
from tests.experiments import toy
from tests.experiments.toy import started

PARAMETERS = """
tier = "cpu"
seed = 7
models = []
"""
RUN = """
from pathlib import Path
from tests.experiments import toy
toy.register(Path(TOY_FOLDER))
---
from specter_lab.experiments.run import run
result = run("toy-squares", tier=tier, seed=seed, models=models)
print("largest", result.rows.square.max(), "in", result.folder)
"""


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """Writes the toys' notebook; its cells stand apart by `---`."""
    monkeypatch.setattr(runner, "NOTEBOOKS", tmp_path)

    def write(text):
        text = PARAMETERS + "---" + text.replace("TOY_FOLDER", repr(str(tmp_path)))
        cells = [nbformat.v4.new_code_cell(cell.strip()) for cell in text.split("---")]
        cells[0].metadata["tags"] = ["parameters"]
        for name in ("toy-squares", "toy-again"):
            nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / f"{name}.ipynb")

    return write


def test_reproduce_leaves_a_complete_result(log, notebook, capsys):
    notebook(RUN)
    result = runner.reproduce("squares", seed=3)
    assert result.rows["square"].max() == pytest.approx(9.3)
    executed = (result.folder / "notebook.ipynb").read_text()
    assert "largest 9.3" in executed, "the notebook gets the seed and finds the result"
    assert sum(started(log).values()) == 4, "the notebook computes no row again"
    assert result.provenance["seed"] == 3 and set(result.provenance["inputs"]) == {"claims"}
    printed = capsys.readouterr().out
    assert "paper >= 9x / recorded - / yours 9.3x" in printed and "reproduced: the value is within the bound" in printed
    results.record("toy-squares", "cpu")
    assert compare.comparison("toy-squares", "cpu").iloc[0]["recorded"] == "9.3x, n = 4"


def test_reproduce_answers_in_json(log, notebook, capsys):
    """The claims alone go to standard output; what a run prints otherwise, to standard error."""
    notebook(RUN)
    assert main(["reproduce", "squares", "--seed", "3", "--json"]) == 0
    said = capsys.readouterr()
    (claim,) = json.loads(said.out)
    assert (claim["experiment"], claim["tier"]) == ("toy-squares", "cpu")
    assert (claim["yours"], claim["verdict"]) == ("9.3x, n = 4", "reproduced")
    assert "toy-squares: notebook executed in" in said.err


COUNT_ROWS = """
import os, time
from pathlib import Path
log = Path(os.environ["TOY_LOG"])
while len(log.read_text().splitlines()) < int(os.environ["TOY_WANTED"]):
    time.sleep(0.05)
print(len(log.read_text().splitlines()), "rows started,", os.environ.get("OMP_NUM_THREADS"), "thread")
"""


def toy_again_fails(context):
    """The toy's rows, the second of which is told to fail."""
    work = [replace(job, arguments={**job.arguments, "fail": "1"}) for job in toy.squares(context)]
    return pd.DataFrame(jobs.run(context, work))


def executed(result):
    return (result.folder / "notebook.ipynb").read_text()


def test_the_next_experiment_computes_beside_the_last_rows_of_one(log, notebook, monkeypatch, capsys):
    """The last row of the first experiment waits for one of the second; a mistake in one keeps none of the others from being done."""
    notebook(COUNT_ROWS)
    monkeypatch.setattr(runner, "process_count", lambda *_: 2)
    monkeypatch.setenv("TOY_LINES", "5")
    monkeypatch.setenv("TOY_WANTED", "5")
    done = dict(runner.reproduce_each(["specter-kernel", "squares", "toy-squares", "again"]))
    assert isinstance(done["specter-kernel"], UserError) and len(done) == 3, "each once"
    rows = ["0", "1", "2", "3"]
    assert sorted(line.split()[0] for line in log.read_text().splitlines()) == sorted(2 * rows)
    assert len({line.split()[1] for line in log.read_text().splitlines()}) == 2, "both in the same processes"
    assert all("rows started, 1 thread" in executed(done[name]) for name in ("toy-squares", "toy-again"))
    assert done["toy-squares"].rows["square"].tolist() == done["toy-again"].rows["square"].tolist() == [0, 1, 4, 9]
    assert capsys.readouterr().out.count(": notebook executed in") == 2
    assert not multiprocessing.active_children()


def test_a_failed_experiment_leaves_the_one_beside_it_alone(log, notebook, monkeypatch):
    notebook("print('shown')")
    monkeypatch.setattr("tests.experiments.toy_again.run", toy_again_fails)
    done = dict(runner.reproduce_each(["again", "squares"]))
    assert str(done["toy-again"]) == "square of 1: it was told to fail: tell it not to"
    assert "shown" in executed(done["toy-squares"])


def test_nothing_runs_beside_an_experiment_that_measures_times(log, notebook, monkeypatch):
    notebook(COUNT_ROWS)
    monkeypatch.setenv("TOY_WANTED", "0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    both = ["toy-squares", "toy-again"]
    for module in (runner, provenance):
        monkeypatch.setattr(module, "TIMED", set(both))
    monkeypatch.setattr(runner, "process_count", lambda *_: 2)
    monkeypatch.setattr(runner, "TIMED_NOTEBOOKS", set(both))
    first, second = [executed(result) for _, result in runner.reproduce_each(both)]
    assert "4 rows started, None thread" in first, "executed before the second began, with all threads"
    assert "8 rows started, None thread" in second
    assert len({line.split()[1] for line in log.read_text().splitlines()}) == 1, "both in the same process"
    log.unlink()
    monkeypatch.setattr(runner, "TIMED_NOTEBOOKS", set())
    done = dict(runner.reproduce_each(both, fresh=True))
    assert all("8 rows started, 1 thread" in executed(done[name]) for name in both), "side by side, after all rows"
    assert not any(result.provenance["beside_others"] for result in done.values())
    assert not multiprocessing.active_children()
    monkeypatch.setattr(runner, "TIMED", {"toy-squares"})
    names = [name for name, _ in runner.reproduce_each(["toy-squares", "toy-again"])]
    assert names == ["toy-again", "toy-squares"], "those that measure times come afterwards"


def test_a_result_for_the_same_question_is_not_measured_again(log):
    first, again = run("toy-squares"), run("toy-squares")
    assert again.provenance == first.provenance
    assert sum(started(log).values()) == 4
    fresh = run("toy-squares", fresh=True)
    assert sum(started(log).values()) == 8
    assert (fresh.folder / "rows.csv").read_bytes() == (again.folder / "rows.csv").read_bytes()
    other = run("toy-squares", models=["qwen-nano"])
    assert other.folder.name == "cpu-own" and results.read("toy-squares", "cpu", paths.RESULTS) is not None


def test_an_error_for_the_user_comes_out_of_a_notebook_as_one_sentence(log, notebook):
    notebook("from specter_lab.errors import UserError\nraise UserError('do that')")
    with pytest.raises(UserError, match="^do that$"):
        runner.reproduce("toy-squares")
    notebook("half = 1 / 0  # never")
    sentence = r"toy-squares.ipynb failed \(ZeroDivisionError: division by zero\) in the cell that begins 'half = 1 / 0"
    with pytest.raises(UserError, match=sentence):
        runner.reproduce("toy-squares")


@pytest.mark.parametrize(
    "kernel, why",
    [("import time; time.sleep(600)", "didn't respond in 2 seconds"), ("raise SystemExit", "died before")],
)
def test_a_kernel_that_does_not_start_is_one_sentence(log, notebook, tmp_path, monkeypatch, kernel, why):
    notebook(RUN)
    (tmp_path / "ipykernel_launcher.py").write_text(kernel)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(runner, "KERNEL_START_S", 2)
    with pytest.raises(
        UserError, match=f"the kernel of notebooks/toy-squares.ipynb did not start .*{why}.*: close other"
    ):
        runner.reproduce("toy-squares")
    assert results.read("toy-squares", "cpu", paths.RESULTS) is not None, "the run itself is kept"


def test_the_kernel_needs_no_home_and_runs_where_the_command_does(log, notebook, tmp_path, monkeypatch):
    """Relative paths to models and output stay right; a home folder may be missing, or its path too long for sockets."""
    notebook("import os\nprint('in', os.path.basename(os.getcwd()))")
    monkeypatch.setenv("HOME", str(tmp_path / ("long" * 30)))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "in here" in (runner.reproduce("toy-squares").folder / "notebook.ipynb").read_text()


def test_provenance_names_no_commit_of_a_repository_around_the_project(tmp_path, monkeypatch):
    for command in (["init"], ["-c", "user.name=n", "-c", "user.email=e", "commit", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "unpacked").mkdir()
    monkeypatch.setattr(paths, "ROOT", tmp_path / "unpacked")
    assert provenance._version() == {"commit": None, "uncommitted_changes": None}
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert len(provenance._version()["commit"]) == 40
    monkeypatch.setenv("PATH", "")
    assert provenance._version() == {"commit": None, "uncommitted_changes": None}


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (
            ["reproduce", "table1", "--seed", "-1"],
            "a seed of -1 is not used here: give a whole number from 0 to 4294967295",
        ),
        (["reproduce", "table1", "--seed", str(2**32)], "a seed of 4294967296 is not used here"),
        (["reproduce", "specter-tabel1"], "no experiment 'specter-tabel1': did you mean specter-table1"),
        (["reproduce", "tabel1"], "did you mean table1"),
        (["reproduce", "zzz"], "`make help` lists them all"),
        (["reproduce", "table1", "--tier", "gpu"], "specter-table1 has no 'gpu' tier: give cpu or paper"),
        (
            ["reproduce", "depth", "--tier", "gpu", "--models", "qwen-proxy"],
            "qwen-proxy is not in data/zoo: proxies are",
        ),
        (["reproduce", "table1", "--tier", "tpu"], "no tier 'tpu': give one of cpu, gpu, paper"),
        (["record", "routing-match"], "no complete cpu result of specter-routing-match to record"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(out, capsys, arguments, sentence):
    assert main(arguments) == 2
    stderr = capsys.readouterr().err
    assert sentence in stderr and stderr.count("\n") == 1 and stderr.startswith("specter-lab: ")


@pytest.mark.parametrize(
    "name, way_out",
    [
        ("depth", "its cpu tier (without TIER=gpu, or --tier) runs on any machine"),
        ("engine", "its notebook shows what was recorded on one"),
        ("translation-speed", "run it on a machine that has one"),
    ],
)
def test_without_a_gpu_that_is_what_is_missing(out, capsys, monkeypatch, name, way_out):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (paths.RECORDED / "specter-engine" / "gpu").mkdir(parents=True, exist_ok=True)
    assert main(["reproduce", name, "--tier", "gpu"]) == 2  # though the proxies are not trained either
    assert capsys.readouterr().err == f"specter-lab: {find(name).id} measures a CUDA GPU and there is none: {way_out}\n"


def test_an_error_of_the_real_command_is_one_line():
    command = [sys.executable, "-m", "specter_lab.cli", "reproduce", "specter-tabel1"]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_importing_transformers_prints_nothing():
    code = "import specter_lab.models.load"
    done = subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_readme_table_is_replaced_between_its_markers(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{compare.BEGIN}\nold\n{compare.END}\nafter\n")
    compare.update_readme(readme)
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "\nold\n" not in text
    assert "| `make reproduce-table1` | 92.96 % |" in text
    readme.write_text("no markers")
    with pytest.raises(UserError, match="README.md has no lines"):
        compare.update_readme(readme)


def test_a_notebook_shows_what_there_is_until_it_is_told_to_recompute(log):
    yours = run("toy-squares")
    nbformat.write(nbformat.v4.new_notebook(), log.parent / "empty.ipynb")
    results.add_notebook(yours, log.parent / "empty.ipynb")
    recorded = results.record("toy-squares", "cpu")
    shutil.rmtree(yours.folder)
    assert load_or_run("toy-squares").origin == recorded.origin == "recorded"
    assert sum(started(log).values()) == 4
    again = load_or_run("toy-squares", recompute=True)
    assert again.origin == "yours" and load_or_run("toy-squares").origin == "yours"
    assert load_or_run("toy-squares", recompute=True).provenance == again.provenance, "what is yours is kept"


def test_a_recorded_figure_is_found_from_a_results_folder(log, notebook):
    """A notebook shows the recorded figure by a relative link, and its executed copy lies elsewhere."""
    notebook(RUN)
    written = nbformat.read(runner.NOTEBOOKS / "toy-squares.ipynb", 4)
    written.cells.append(nbformat.v4.new_markdown_cell("![f](../artifacts/recorded/toy-squares/cpu/figure.png)"))
    nbformat.write(written, runner.NOTEBOOKS / "toy-squares.ipynb")
    text = (runner.reproduce("toy-squares").folder / "notebook.ipynb").read_text()
    assert "](../../../recorded/toy-squares/cpu/figure.png)" in text


def test_a_notebook_shows_a_users_mistake_without_a_stack_trace():
    shell = InteractiveShell.instance()
    with capture_output() as shown:
        shell.run_cell("from specter_lab.errors import UserError\nraise UserError('do that')")
    InteractiveShell.clear_instance()
    assert shown.stdout.strip() == "UserError: do that"
