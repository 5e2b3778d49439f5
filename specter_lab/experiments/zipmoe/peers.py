"""The paper's other baselines: run where somebody has installed them, else a row says why not.

They are given the budget that ZipMoE has. What they make of it is theirs, and the row says where the weights lay.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import torch

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context
from specter_lab.experiments.installed import NOT_INSTALLED, found
from specter_lab.experiments.zipmoe.setting import BUDGET, prompts, scratch, wide
from specter_lab.paths import ROOT

PEERS = {"DeepSpeed ZeRO-3": "deepspeed", "MoE-Infinity": "moe_infinity"}  # name -> package
NEED_A_GPU = ("moe_infinity",)
NEW_TOKENS, TIMEOUT_S = 4, 600  # the first run compiles extensions
THEIR_OWN = "their own"  # instead of a state of the page cache


def peer_rows(context: Context, models: Sequence[str]) -> jobs.Rows:
    """One row per installed peer and model; a peer that cannot run has one, without times and with the reason."""
    absent, work = [], []
    for peer, package in PEERS.items():
        if why := why_not(package):
            absent.append({"system": peer, "note": why})
            continue
        for model in models:
            asked = {"model": model, "peer": peer, "release": found(package), "seed": context.seed}
            work.append(jobs.Job(f"{peer}, {model}", measure, asked, alone=True))
    return [*jobs.run(context, work), *absent] if work else absent


def why_not(package: str) -> str | None:
    """Why a peer cannot run here; None: it can."""
    if found(package) is None:
        return NOT_INSTALLED
    if package in NEED_A_GPU and not torch.cuda.is_available():
        return f"not run: {package} {found(package)} is installed, and needs a CUDA GPU"
    return None


def measure(model: str, peer: str, release: str, seed: int) -> jobs.Rows:
    """One request to a peer: TTFT and TPOT with its version and command, or what stopped it. `release` belongs to the key."""
    ready = wide(model)
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        arguments = [
            PEERS[peer], str(ready.checkpoint), "--ids", ",".join(map(str, prompts(model, 1, seed)[0].tolist())),
            "--new-tokens", str(NEW_TOKENS), "--budget-bytes", str(ready.budget_bytes(BUDGET)), "--folder", folder,
        ]  # fmt: skip
        command = [sys.executable, "-m", "specter_lab.experiments.zipmoe.peer_job", *arguments]
        named = f"{PEERS[peer]} {release}"
        row = {"model": model, "system": peer, "cache": THEIR_OWN, "repeat": 0}
        extensions = scratch() / "extensions"
        places = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": places, "TORCH_EXTENSIONS_DIR": str(extensions)}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            shutil.rmtree(extensions, ignore_errors=True)  # a killed compilation leaves a lock
            return [row | {"note": f"not run: {named} did not end within {TIMEOUT_S} s"}]
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["it said nothing"]
    if done.returncode != 0:
        return [row | {"note": f"not run: {named} stopped: {lines[-1]}"}]
    times = json.loads(lines[-1])
    shown = shlex.join(["python", *command[1:4], "CHECKPOINT", *command[5:-1], "DIR"])
    return [row | {"new_tokens": NEW_TOKENS, "ttft_ms": round(1e3 * times["ttft_s"], 3), "tpot_ms": round(1e3 * times["tpot_s"], 3),
                   "note": f"{named}, weights in {times['where']}: {shown}"}]  # fmt: skip
