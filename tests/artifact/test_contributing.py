"""The examples of CONTRIBUTING.md, done to a copy of the project as they stand there."""

import json
import os
import re
import shutil
import subprocess
import sys

import jupytext
import pytest

from specter_lab.artifact import house
from specter_lab.paths import ROOT

BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', flags=re.DOTALL | re.MULTILINE)


def blocks():
    """(language, file, text) of every titled block."""
    return BLOCK.findall(house.GUIDE.read_text(encoding="utf-8"))


def apply(language, file, text, root):
    """What a reader does with a block: a new file, lines added to one, or a notebook."""
    path = root / file
    if language == "diff":
        lines = text.splitlines()
        old, new = ("\n".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
        content = path.read_text(encoding="utf-8")
        assert content.count(old) == 1, f"{file} has no place like this: {old}"
        path.write_text(content.replace(old, new), encoding="utf-8")
    elif language == "toml":
        path.write_text(f"{path.read_text(encoding='utf-8')}\n{text}", encoding="utf-8")
    elif path.suffix == ".ipynb":
        jupytext.write(jupytext.reads(text, fmt="py:percent"), path)
    else:
        assert not path.exists(), f"{file} is there already"
        path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the project with all examples in it."""
    root = tmp_path_factory.mktemp("copy")
    for name in ("specter_lab", "tests", "notebooks", "data"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "Makefile",
        "pyproject.toml",
        "requirements.lock",
        "README.md",
        "CONTRIBUTING.md",
        "artifacts/claims.toml",
        "artifacts/papers.toml",
    ):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    for block in blocks():
        apply(*block, root)
    return root


def python(root, *arguments, **more):
    """What a Python of the copy prints; it may need nothing of the original."""
    environment = os.environ | {"PYTHONPATH": str(root), "SPECTER_LAB_OUT": str(root / "out"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=root, env=environment | more, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_promise_has_its_example():
    files = [file for _, file, _ in blocks()]
    for folder in ("models/adapters", "compress", "plan/policies", "experiments/specter"):
        new = [
            file for language, file, _ in blocks() if file.startswith(f"specter_lab/{folder}/") and language == "python"
        ]
        assert len(new) == 1, folder
    assert len([language for language, _, _ in blocks() if language == "diff"]) == 4
    assert {"artifacts/claims.toml", "notebooks/specter-expert-bytes.ipynb"} <= set(files)


def test_a_model(copy, tmp_path):
    """A random checkpoint of the new architecture is loaded, quantised, drafted with and verified."""
    made = """
import sys, torch
from pathlib import Path
from transformers import FlexOlmoConfig
from tests.models import foreign
foreign.CONFIGS["flex_olmo"] = FlexOlmoConfig(**foreign.COMMON, intermediate_size=64, num_experts=16)
foreign.save("flex_olmo", Path(sys.argv[1]))
"""
    python(copy, "-c", made, str(tmp_path / "flex"))
    options = ["--quantizer", "rtn-int4", "--requests", "2", "--max-tokens", "24", "--depth", "4", "--prompts", "prose"]
    report = json.loads(python(copy, "-m", "specter_lab.cli", "measure", str(tmp_path / "flex"), *options, "--json"))
    assert "flex" in json.dumps(report)


def test_a_quantiser(copy):
    """It makes a checkpoint that reads back nearer to the weights than plain rounding does."""
    compared = """
import torch
from pathlib import Path
from specter_lab.compress.checkpoint import load_quantized
from specter_lab.compress.quantizers import quantize
from specter_lab.models.experts import read_banks
from specter_lab.models.load import load
model = load("qwen-nano")
ids = torch.randint(5, 2000, (2, 64))
def error(name):
    banks = load_quantized(quantize(model, name, ids, Path("cache")), model).banks
    return sum(float((ours.up - bank.up.float()).square().sum()) for ours, bank in zip(banks, read_banks(model.model)))
print(error("rtn-int4-clipped"), error("rtn-int4"))
"""
    clipped, nearest = map(float, python(copy, "-c", compared).split())
    assert 0 < clipped < 0.97 * nearest


def test_a_policy(copy):
    """It is found by name, and the simulator runs it."""
    simulated = """
from specter_lab.plan.policies import find_policy
from specter_lab.plan.simulate import simulate
from tests.plan.made import scene_of, windows_of
windows = windows_of(positions=16, layers=4)
workload, scene = scene_of(windows, 4)
for name in ("popular", "lru"):
    print(simulate(workload, find_policy(name), scene, new_tokens=16).hits.rates()["distinct"])
"""
    popular, lru = map(float, python(copy, "-c", simulated).split())
    assert 0 < popular < 1 and popular != lru


def test_a_figure(copy):
    """From the command to rows, figure, executed notebook and verdict, and the house's own rules hold."""
    printed = python(copy, "-m", "specter_lab.cli", "reproduce", "expert-bytes")
    assert "paper 17.3 MB / recorded - / yours 17.3 MB" in printed and "reproduced" in printed
    made = {file.name for file in (copy / "out" / "results" / "specter-expert-bytes" / "cpu").iterdir()}
    assert made >= {"rows.csv", "claims.json", "figure.png", "notebook.ipynb", "provenance.json"}
    rules = "ids_are_the_same or has_claims or aliases or clean_and_takes or only_to_the_left"
    python(
        copy,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/test_house.py",
        "tests/test_imports.py",
        "-k",
        rules,
    )


def test_the_map_is_of_this_house():
    """Every module has its line, under its package; the packages stand in the order that imports follow."""
    headings = re.findall(r"^\*\*(\w+)\*\*$", house.house_map(), flags=re.MULTILINE)
    assert headings[: len(house.ORDER) + 1] == ["specter_lab", *house.ORDER] and len(headings) == len(set(headings))
    listed = re.findall(r"^- `([^`]+)`: \S", house.house_map(), flags=re.MULTILINE)
    assert len(listed) == len(house.modules())
    assert house.with_map() == house.GUIDE.read_text(encoding="utf-8"), "run `make documents`"
