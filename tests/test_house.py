"""What holds the project together: one id everywhere, one set of pins, a clean top level."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from specter_lab.experiments import compare
from specter_lab.experiments.claims import claims_of, read_claims
from specter_lab.experiments.help import experiment_targets, house_targets
from specter_lab.experiments.registry import DEFAULT_MODELS, EXPERIMENTS, LABS, TIERS
from specter_lab.paths import CLAIMS, ROOT

TOP_LEVEL = {
    "notebooks", "specter_lab", "artifacts", "data", "environment.yml", "Makefile", "tests", "README.md",
    "pyproject.toml", "requirements.lock", "LICENSE", "NOTICE", "CITATION.cff", ".zenodo.json",
    "CONTRIBUTING.md", "CHANGELOG.md", "Containerfile", ".dockerignore", ".gitignore", ".ci",
}  # fmt: skip
LAB_PREFIXES = ("00-", "lab-")
RAY_LOCK = ROOT / "specter_lab" / "experiments" / "ray.lock"  # what `make setup-ray` adds
BROWSER_LOCK = ROOT / "tests" / "browser" / "browser.lock"  # what `make test-browser` adds
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".ipynb", ".cff", ".json", ".csv", ".lock", ".txt", ""}
MACHINE_PATH = re.compile(r"(?<![\w.~])/(?:work|root|home|Users|opt|tmp)/\w")


def project_files():
    """Files that are, or would be, in git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") is None:
        pytest.skip("no git")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def as_in_git(file):
    """What git would commit: a reader's own copy, saved by JupyterLab with its outputs, is the reader's business."""
    git = shutil.which("git")
    done = git and subprocess.run([git, "show", f":./{file.relative_to(ROOT)}"], cwd=ROOT, capture_output=True)
    return done.stdout.decode() if done and done.returncode == 0 else file.read_text(encoding="utf-8")


def pins(lock=ROOT / "requirements.lock"):
    lines = lock.read_text().split()
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def help_text():
    command = ["make", "--no-print-directory", "help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_top_level_is_exact():
    assert {file.relative_to(ROOT).parts[0] for file in project_files()} == TOP_LEVEL


def test_ids_are_the_same_everywhere():
    ids, labs = set(EXPERIMENTS), set(LABS)
    assert {notebook.stem for notebook in NOTEBOOKS} == ids | labs
    assert {claim_id.split("/")[0] for claim_id in read_claims(CLAIMS)} >= ids
    targets = set(re.findall(r"^  (reproduce-\S+)", help_text(), flags=re.MULTILINE)) - {"reproduce-all"}
    assert targets == {target for row in EXPERIMENTS.values() for target in experiment_targets(row)}
    for folder in (ROOT / "artifacts" / "recorded").glob("*"):
        assert folder.name in ids


def test_labs_are_told_apart_by_their_prefix_and_claim_nothing():
    lab_targets = set(re.findall(r"^  ((?:lab|00)-\S+)", help_text(), flags=re.MULTILINE))
    notebooks = {notebook.stem for notebook in NOTEBOOKS if notebook.stem.startswith(LAB_PREFIXES)}
    assert notebooks == set(LABS) == lab_targets
    assert not any(claim_id.startswith(LAB_PREFIXES) for claim_id in read_claims(CLAIMS))
    assert not any(name.startswith(LAB_PREFIXES) for row in EXPERIMENTS.values() for name in (row.id, *row.aliases))


def test_the_course_begins_with_the_first_notebook_of_the_folder():
    assert NOTEBOOKS[0].stem == next(iter(LABS)) == "00-start-here"


def test_every_experiment_has_claims_and_known_tiers():
    for row in EXPERIMENTS.values():
        assert any(claim.headline for claim in claims_of(row.id)), row.id
        assert set(row.minutes) <= set(TIERS) == set(DEFAULT_MODELS)


def test_aliases_are_unambiguous():
    names = [name for row in EXPERIMENTS.values() for name in (row.id, *row.aliases)]
    assert len(names) == len(set(names))


def test_help_lists_every_target_without_the_environment():
    """On a bare Python: no site packages, so nothing that is installed can be needed."""
    command = [sys.executable, "-S", "-m", "specter_lab.experiments.help"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert text == help_text()
    for target, _ in house_targets():
        assert re.search(rf"^  {target}\s", text, flags=re.MULTILINE)


def test_default_models_are_known():
    from specter_lab.models.geometry import GEOMETRY
    from specter_lab.models.zoo.shapes import SHAPES

    known = {row.name for row in GEOMETRY.values()} | {row.hub_id for row in GEOMETRY.values()} | SHAPES.keys()
    assert {model for models in DEFAULT_MODELS.values() for model in models} <= known


def test_conda_installs_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, installer, by_pip = environment["dependencies"]
    assert (python, installer) == ("python=3.11", "pip")
    assert by_pip == {"pip": ["-r requirements.lock", "-e ."]}
    assert "LOCK := requirements.lock" in (ROOT / "Makefile").read_text()


def test_ranges_admit_the_pins():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    locked = pins() | pins(RAY_LOCK) | pins(BROWSER_LOCK)
    for line in ranges:
        requirement = Requirement(line)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), line


def test_this_environment_is_the_locked_one():
    for name, pin in pins().items():
        assert importlib.metadata.version(name).split("+")[0] == pin, name


def test_no_machine_paths():
    for file in project_files():
        if file.suffix in TEXT_SUFFIXES:
            notebook = file.suffix == ".ipynb"
            text = as_in_git(file) if notebook else file.read_text(encoding="utf-8", errors="ignore")
            found = MACHINE_PATH.search(text)
            assert not found, f"{file.relative_to(ROOT)} names {found.group()}..."


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebook_is_clean_and_takes_parameters(notebook):
    cells = json.loads(as_in_git(notebook))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    parameters = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    assert len(parameters) == 1
    names = set(re.findall(r"^(\w+) = ", "".join(parameters[0]["source"]), flags=re.MULTILINE))
    if notebook.stem in LABS:
        assert {"model", "seed"} <= names
    else:
        assert {"tier", "seed", "models", "recompute"} <= names
        assert sum("recompute=recompute" in "".join(cell["source"]) for cell in code) == 1


@pytest.mark.parametrize("folder", sorted((ROOT / "artifacts" / "recorded").glob("*/*")), ids=lambda f: f.parent.name)
def test_a_notebook_opens_with_its_recorded_figure(folder):
    """On any machine, before anything has run: a link to the picture is among the first cells."""
    cells = json.loads((ROOT / "notebooks" / f"{folder.parent.name}.ipynb").read_text(encoding="utf-8"))["cells"]
    pictures = [f"](../artifacts/recorded/{folder.parent.name}/{tier}/figure.png)" for tier in TIERS]
    opening = "".join("".join(cell["source"]) for cell in cells[:2])
    assert any(picture in opening for picture in pictures), f"show {pictures[0]} in the second cell"
    assert (folder / "figure.png").exists()


def test_readme_is_short_and_shows_the_recorded_results():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    table = text.split(compare.BEGIN)[1].split(compare.END)[0].strip()
    assert table == compare.markdown(compare.headline_table()), "run `make readme`"


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["lint", "format"])
def test_ruff_finds_nothing(command):
    found = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--quiet"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_an_image_leaves_out_what_git_leaves_out():
    def patterns(name):
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        return {line.strip("/").removeprefix("**/") for line in lines if line and not line.startswith("#")}

    assert patterns(".dockerignore") == patterns(".gitignore")


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_a_misspelt_variable_is_not_passed_over():
    def make(*given):
        return subprocess.run(["make", "--dry-run", "help", *given], cwd=ROOT, capture_output=True, text=True)

    wrong = make("PROFIL=rtx4090")
    assert wrong.returncode == 2 and "nothing takes PROFIL=: there are TIER" in wrong.stderr
    assert make("PROFILE=rtx4090", "SEED=1", "MODELS=a b", "ARGS=-k one").returncode == 0


def test_nobody_has_to_read_all_of_the_help():
    command = f"{sys.executable} -m specter_lab.experiments.help | true"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
