"""How fast the simulator is: `python -m specter_lab.plan.bench_simulate [windows files]`.

Prints, for every policy and every file of recorded windows (default: those in artifacts/cache/windows), the expert accesses
it simulates per second of one core: uses (one token's use of one expert) and distinct experts per layer and pass. Each
stands for the original of its zoo model, on the paper's GPU, with a quarter of the experts in slots. Process time is taken, of
the second of two runs, so neither other processes nor the compiler count.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.measure.windows import Windows, read_windows
from specter_lab.models.anatomy import Anatomy, anatomy_of
from specter_lab.models.zoo.shapes import SHAPES
from specter_lab.plan.hardware import read_profile
from specter_lab.plan.policies import POLICIES
from specter_lab.plan.policy import Policy, Scene
from specter_lab.plan.serve import NEEDED, USES
from specter_lab.plan.simulate import simulate
from specter_lab.plan.step_costs import StepCosts
from specter_lab.plan.workload import Workload, workload_for

REQUESTS, HISTORY = 10, 5  # simulated, and learned from


@dataclass(frozen=True)
class Speed:
    """One policy on one recording."""

    policy: str
    uses_per_s: float
    distinct_per_s: float


def fitting(windows: Windows, policies: list[Policy]) -> list[Policy]:
    """Those that can use the draft that was recorded, or none."""
    fewer = windows.draft.shape[-1] < windows.target.shape[-1]
    return [policy for policy in policies if policy.draft is None or (policy.draft == "fewer") == fewer]


def speeds(windows: Windows, model: Anatomy, policies: list[Policy]) -> list[Speed]:
    """How fast each `fitting` policy is simulated."""
    everyone = range(windows.requests)
    history = workload_for(windows.of(list(everyone[-HISTORY:])), model)
    requests = workload_for(windows.of(list(everyone[:REQUESTS])), model)
    slots, costs = max(1, model.num_experts // 4), StepCosts(model, read_profile())
    scene = Scene(costs, slots, windows.depth, history, requests)
    return [_speed(requests, policy, scene) for policy in fitting(windows, policies)]


def _speed(requests: Workload, policy: Policy, scene: Scene) -> Speed:
    new_tokens = requests.windows.positions
    simulate(requests, policy, scene, new_tokens=new_tokens)
    began = time.process_time()
    counts = simulate(requests, policy, scene, new_tokens=new_tokens).hits.counts
    seconds = time.process_time() - began
    return Speed(policy.id, counts[USES] / seconds, counts[NEEDED] / seconds)


def main(arguments: list[str]) -> None:
    """Print one line per recording and policy."""
    files = [Path(name) for name in arguments] or sorted((paths.CACHE / "windows").glob("*.safetensors"))
    if not files:
        raise UserError("no recorded windows: name a file, or run `make reproduce-specter-hit-rate` first")
    print(f"{'windows':<44}{'policy':<15}{'M uses/s':>9}{'M distinct/s':>14}")
    for file in files:
        shape = next((name for name in SHAPES if file.name.startswith(f"{name}-")), None)
        if shape is None:
            raise UserError(f"{file.name} does not begin with the name of a zoo model: {', '.join(SHAPES)}")
        if not file.exists():
            raise UserError(f"there is no file {file}: name one of {paths.CACHE / 'windows'}, or none for all of them")
        windows, everyone = read_windows(file), list(POLICIES.values())
        for speed in speeds(windows, anatomy_of(SHAPES[shape].original), everyone):
            print(f"{file.stem:<44}{speed.policy:<15}{speed.uses_per_s / 1e6:>9.2f}{speed.distinct_per_s / 1e6:>14.2f}")
        chosen = fitting(windows, everyone)
        for policy in (policy for policy in everyone if policy not in chosen):
            print(f"{file.stem:<44}{policy.id:<15} left out: drafts with {policy.draft!r}, windows of another draft")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(str(error))
