"""Offloading that people have installed, on the same machine at the same GPU memory: what a user would reach for first."""

from __future__ import annotations

import time
from importlib.metadata import version
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from specter_lab.experiments import jobs
from specter_lab.experiments.installed import NOT_INSTALLED, found
from specter_lab.experiments.specter import routing
from specter_lab.experiments.specter.setting import BUDGETS, priced_as, slots_of
from specter_lab.models.load import shown_name
from specter_lab.models.originals import config_for
from specter_lab.plan.budget import gpu_bytes
from specter_lab.plan.hardware import PAPERS_GPU, read_profile
from specter_lab.plan.policies import find_policy
from specter_lab.plan.policy import Scene
from specter_lab.plan.step_costs import StepCosts

NEW_TOKENS, PROMPT_TOKENS = 4, 16
ACCELERATE = "transformers + Accelerate"
NOT_TRIED = {"llama.cpp": "llama-bench", "vLLM": "vllm", "MoE-Infinity": "moe_infinity"}  # and what to look for


def peer_rows(model: str, digest: str, seed: int) -> jobs.Rows:
    """One row per peer: milliseconds per token of the original's sizes with as much on the GPU as Specter holds at the high
    budget, or why it was not run. `digest` and `seed` belong to every job's key."""
    anatomy, family = priced_as(model), routing.family(model)
    slots = int(slots_of(model, family)["high"])
    scene = Scene(StepCosts(anatomy, read_profile(PAPERS_GPU)), slots, BUDGETS[family].depth)
    on_gpu = gpu_bytes(find_policy("specter"), scene, np.full(anatomy.moe_layers, slots))
    rows = [
        accelerate_row(anatomy.name, on_gpu),
        *(_absent(name, looked_for) for name, looked_for in NOT_TRIED.items()),
    ]
    return [{"model": shown_name(model), "family": family, "original": anatomy.name} | row for row in rows]


def accelerate_row(original: str, gpu_bytes: int) -> dict:
    """Layers that do not fit stay in host memory and cross the link whenever they compute.

    Every weight is the same number: layer offload moves a layer whatever it holds.
    """
    from accelerate import dispatch_model, infer_auto_device_map

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_for(original), dtype=torch.bfloat16)
    model.to_empty(device="cpu").eval()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(0.01)
    model.tie_weights()
    places = infer_auto_device_map(
        model, {0: gpu_bytes, "cpu": 2**50}, no_split_module_classes=list(model._no_split_modules), dtype=torch.bfloat16
    )
    model = dispatch_model(model, places, main_device=0)
    ids, cache, times_ms = torch.full((1, PROMPT_TOKENS), 5, device="cuda"), None, []
    with torch.inference_mode():
        for _ in range(1 + NEW_TOKENS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            torch.cuda.synchronize()
            times_ms.append((time.perf_counter() - began) * 1e3)
    on_gpu = sum(place == 0 for place in places.values())
    return {
        "by": "peer", "item": ACCELERATE, "measured_ms_per_token": round(median(times_ms[1:]), 2), "n_tokens": NEW_TOKENS,
        "gpu_expert_gb": round(gpu_bytes / 1e9, 3), "title": f"accelerate {version('accelerate')}, {on_gpu} of {len(places)} modules on the GPU",
    }  # fmt: skip


def _absent(name: str, looked_for: str) -> dict:
    """A row that says why a peer was not run."""
    here = found(looked_for)
    why = f"not run: {here} is installed, but there is no launcher for it yet" if here else NOT_INSTALLED
    return {"by": "peer", "item": name, "title": why}
