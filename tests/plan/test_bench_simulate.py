"""A sweep has to be a coffee break: at least a million expert accesses per second of one core, for every policy."""

import subprocess
import sys

import numpy as np
import pytest

from specter_lab.measure.windows import read_windows, write_windows
from specter_lab.models.anatomy import anatomy_of
from specter_lab.paths import CACHE, ROOT
from specter_lab.plan.bench_simulate import speeds
from specter_lab.plan.policies import POLICIES
from tests.plan.made import windows_of

FLOOR = 1e6  # measured: 1.2e6 (Phi, two uses per layer and token, plain decoding) to 9e6
MODELS = {"qwen-nano": "Qwen1.5-MoE-A2.7B", "deepseek-nano": "DeepSeek-V2-Lite"}
RECORDED = {name: sorted((CACHE / "windows").glob(f"{name}-int4-*.safetensors"))[-1:] for name in MODELS}


def slow(windows, model):
    """Policies below the floor in three attempts: a busy machine has cold caches."""
    left = list(POLICIES.values())
    for _ in range(3):
        late = {s.policy for s in speeds(windows, model, left) if s.uses_per_s < FLOOR}
        left = [policy for policy in left if policy.id in late]
    return [policy.id for policy in left]


@pytest.mark.parametrize("fewer", [False, True])
def test_a_million_uses_per_second(fewer):
    pytest.importorskip("numba")
    windows = windows_of(
        requests=6, positions=64, depth=8, layers=4, experts=60, top_k=4, prompt=16, fewer=fewer
    )  # fmt: skip
    assert slow(windows, anatomy_of("Qwen1.5-MoE-A2.7B")) == []


@pytest.mark.parametrize("name", [name for name, files in RECORDED.items() if files])
def test_a_million_uses_per_second_on_recorded_windows(name):
    pytest.importorskip("numba")
    windows = read_windows(RECORDED[name][0])
    assert slow(windows.of(np.arange(10)), anatomy_of(MODELS[name])) == []


def bench(*arguments):
    command = [sys.executable, "-m", "specter_lab.plan.bench_simulate", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command_prints_every_policy(tmp_path):
    file = tmp_path / "phi-nano-int4-made-up.safetensors"
    windows = windows_of(requests=6, positions=8, depth=4, layers=2, experts=16, top_k=2)
    write_windows(windows, file, model_digest="made up")
    done = bench(file)
    assert done.returncode == 0, done.stderr
    fitting = [policy.id for policy in POLICIES.values() if policy.draft != "fewer"]
    lines = done.stdout.splitlines()[1:]
    assert [line.split()[1] for line in lines if "left out" not in line] == fitting
    (left_out,) = (line for line in lines if "left out" in line)
    assert left_out.split()[1] == "ss-moe" and left_out.endswith("drafts with 'fewer', windows of another draft")


def test_the_command_refuses_in_one_sentence(tmp_path):
    done = bench(tmp_path / "other.safetensors")
    assert done.returncode == 1 and done.stderr.startswith(
        "other.safetensors does not begin with the name of a zoo model"
    )
    done = bench(tmp_path / "phi-nano-none.safetensors")
    assert done.returncode == 1 and done.stderr.startswith("there is no file ")
    assert "name one of" in done.stderr and "delete" not in done.stderr
