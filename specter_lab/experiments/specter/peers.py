"""Offloading that people have installed, on the same machine at the same GPU memory: what a user would reach for first."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specter_lab import paths
from specter_lab.experiments import jobs
from specter_lab.experiments.installed import NOT_INSTALLED, NotRun, found, or_why, output_of
from specter_lab.experiments.specter import peer_llama, routing
from specter_lab.experiments.specter.engine_runs import forget_weights
from specter_lab.experiments.specter.setting import BUDGETS, priced_as, slots_of
from specter_lab.models.anatomy import Anatomy
from specter_lab.models.load import shown_name
from specter_lab.models.originals import config_for
from specter_lab.plan.budget import gpu_bytes
from specter_lab.plan.hardware import PAPERS_GPU, read_profile
from specter_lab.plan.policies import find_policy
from specter_lab.plan.policy import Scene
from specter_lab.plan.step_costs import StepCosts

NEW_TOKENS, PROMPT_TOKENS = 4, 16
ACCELERATE = "transformers + Accelerate"
VLLM, MOE_INFINITY = "vLLM", "MoE-Infinity"
TIMEOUT_S = 900


def peer_rows(model: str, digest: str, seed: int) -> jobs.Rows:
    """One row per peer: milliseconds per token of the original's sizes with as much on the GPU as Specter holds at the high
    budget, or why it was not run. `digest` and `seed` belong to every job's key."""
    forget_weights()
    anatomy, family = priced_as(model), routing.family(model)
    slots = int(slots_of(model, family)["high"])
    scene = Scene(StepCosts(anatomy, read_profile(PAPERS_GPU)), slots, BUDGETS[family].depth)
    on_gpu = gpu_bytes(find_policy("specter"), scene, np.full(anatomy.moe_layers, slots))
    folder = paths.CACHE / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        accelerate_row(anatomy.name, on_gpu),
        *peer_llama.rows(anatomy.name, anatomy, on_gpu, folder),
        {"by": "peer", "item": VLLM} | or_why(vllm, anatomy, on_gpu, folder),
        {"by": "peer", "item": MOE_INFINITY} | or_why(moe_infinity, anatomy, on_gpu, folder),
    ]
    return [{"model": shown_name(model), "family": family, "original": anatomy.name} | row for row in rows]


def accelerate_row(original: str, gpu_bytes: int) -> dict:
    """Layers that do not fit stay in host memory and cross the link whenever they compute."""
    from accelerate import dispatch_model, infer_auto_device_map

    model = model_of_size(original)
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


def vllm(anatomy: Anatomy, gpu_bytes: int, folder: Path) -> dict:
    """vLLM with random weights; what exceeds the GPU's share stays in host memory and is read over the link."""
    if found("vllm") is None:
        raise NotRun(NOT_INSTALLED)
    offloaded_gib = max(0, anatomy.moe_layers * anatomy.num_experts * anatomy.expert_bytes - gpu_bytes) / 2**30
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        config_for(anatomy.name).save_pretrained(scratch)
        command = [
            "vllm", "bench", "latency", "--model", scratch, "--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16",
            "--cpu-offload-gb", f"{offloaded_gib:.1f}", "--input-len", str(PROMPT_TOKENS), "--batch-size", "1", "--num-iters", "3",
            "--num-iters-warmup", "1",
        ]  # fmt: skip

        def seconds(new_tokens: int) -> float:
            told = Path(scratch) / f"{new_tokens}.json"
            output_of([*command, "--output-len", str(new_tokens), "--output-json", str(told)], TIMEOUT_S)
            return json.loads(told.read_text())["avg_latency"]

        ms = 1e3 * (seconds(1 + NEW_TOKENS) - seconds(1)) / NEW_TOKENS  # without the prompt's pass
    shown = shlex.join(["CONFIG" if word == scratch else word for word in command])
    return {"measured_ms_per_token": round(ms, 2), "n_tokens": 3 * NEW_TOKENS, "gpu_expert_gb": round(gpu_bytes / 1e9, 3),
            "title": f"vllm {found('vllm')}: {shown}, {1 + NEW_TOKENS} tokens less 1"}  # fmt: skip


def moe_infinity(anatomy: Anatomy, gpu_bytes: int, folder: Path) -> dict:
    """MoE-Infinity, from a checkpoint of these sizes."""
    if found("moe_infinity") is None:
        raise NotRun(NOT_INSTALLED)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        checkpoint = Path(scratch) / "checkpoint"
        model_of_size(anatomy.name).save_pretrained(checkpoint)
        command = [
            sys.executable, "-m", "specter_lab.experiments.zipmoe.peer_job", "moe_infinity", str(checkpoint), "--ids",
            ",".join(map(str, range(5, 5 + PROMPT_TOKENS))), "--new-tokens", str(NEW_TOKENS), "--budget-bytes", str(gpu_bytes),
            "--folder", scratch,
        ]  # fmt: skip
        told = json.loads(output_of(command, TIMEOUT_S).strip().splitlines()[-1])
    return {"measured_ms_per_token": round(1e3 * told["tpot_s"], 2), "n_tokens": NEW_TOKENS, "gpu_expert_gb": round(gpu_bytes / 1e9, 3),
            "title": f"moe_infinity {found('moe_infinity')}, weights in {told['where']}"}  # fmt: skip


def model_of_size(original: str) -> PreTrainedModel:
    """A model in host memory: embeddings and routers at random, so that tokens use different experts, all else one number."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_for(original), dtype=torch.bfloat16)
    model.to_empty(device="cpu").eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith((".gate.weight", "embed_tokens.weight")):
            tensor.data.normal_(0, 0.02)
        else:
            tensor.data.fill_(0.01)
    model.tie_weights()
    return model
