"""GPTQ and AWQ by gptqmodel, as a process of its own: one model, one quantiser, routed experts only.

    python -m specter_lab.compress.gptqmodel_job SOURCE DESTINATION --method gptq --bits 4 --calibration ids.npy

The destination is the packed checkpoint that gptqmodel saves, plus report.json. GPTQ leaves all other tensors as they
are. AWQ divides scales out of post_attention_layernorm and multiplies them into all that reads it, each rounded anew,
so for a draft that shares everything else with its target the experts are taken through `compress.awq`.

GPTQ is the paper's (arXiv 2210.17323): symmetric, groups of 128, inputs in order, damping of 1 % of the mean diagonal.
gptqmodel's own defaults are act_group_aware=True, which permutes inputs, damping of 5 %, and rounding to nearest for
experts with less than 0.5 % of the tokens; here only experts without any token are rounded to nearest.
"""

from __future__ import annotations

import os

os.environ.update(  # gptqmodel reads these when it is imported
    GPTQMODEL_CPU_WORKERS="2",  # its default is one worker less than it needs on machines with two cores
    GPTQMODEL_DISABLE_PACK_EXT="1",  # do not compile a packing extension: same bytes, and a compiler less to need
    CUDA_VISIBLE_DEVICES="",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, PretrainedConfig

from specter_lab.compress.job import (
    GROUP,
    JobReport,
    appearing,
    awq_group,
    exit_after,
    job_arguments,
    package_versions,
    read_calibration,
    show_progress,
    write_report,
)
from specter_lab.errors import UserError
from specter_lab.models.adapters import adapter_for

GPTQ_DAMP = 0.01
BATCH_SEQUENCES = 16
ONLY_ROUTED_EXPERTS = r"-:^(?!.*\.experts\.\d+\.).*"  # gptqmodel's `dynamic` syntax: leave out what matches
_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}  # gptqmodel's names, whatever the model's
_BITS = {"gptq": (2, 3, 4, 8), "awq": (4,)}
_NOTES = {
    "gptq": "a row shorter than 128 is one group",
    "awq": "group size is the greatest power of two up to 128 that divides the row; bfloat16 arithmetic, since float32 "
    "is not supported; clipping is searched on 128 to 255 tokens; scales of gate and up are divided out of "
    "post_attention_layernorm, with router and shared experts compensated",
}


def group_sizes(method: str, config: PretrainedConfig) -> dict[str, int]:
    """Inputs that share a scale, per projection."""
    group_of = awq_group if method == "awq" else lambda in_features: min(GROUP, in_features)
    wide, narrow = group_of(config.hidden_size), group_of(adapter_for(config).expert_width(config))
    return {"gate": wide, "up": wide, "down": narrow}


def quantize_config(method: str, bits: int, groups: dict[str, int]):
    """gptqmodel's QuantizeConfig for routed experts only."""
    from gptqmodel import QuantizeConfig
    from gptqmodel.quantization.config import Fallback

    dynamic = {ONLY_ROUTED_EXPERTS: {}}
    common = dict(bits=bits, group_size=GROUP, desc_act=False, offload_to_disk=False, fallback=Fallback(threshold=1))
    if method == "gptq":
        return QuantizeConfig(sym=True, act_group_aware=False, damp_percent=GPTQ_DAMP, dynamic=dynamic, **common)
    for projection, name in _PROJECTIONS.items():
        dynamic[rf"+:.*\.experts\.\d+\.{name}$"] = {"group_size": groups[projection]}
    return QuantizeConfig(quant_method="awq", format="gemm", sym=False, dynamic=dynamic, **common)


def quantize(source: Path, folder: Path, method: str, bits: int, groups: dict[str, int], ids: np.ndarray) -> list[dict]:
    """Quantise `source` with the tokens `ids` [N, T] into `folder`; returns gptqmodel's log, one row per matrix."""
    from gptqmodel import BACKEND, GPTQModel

    # GPTQ in float32. AWQ has bfloat16 and float16 only, and float16 products are slow on CPUs.
    dtype = torch.bfloat16 if method == "awq" else torch.float32
    model = GPTQModel.load(str(source), quantize_config(method, bits, groups), device="cpu", dtype=dtype)
    layers = model.model.config.num_hidden_layers

    def layer_complete(layer_idx: int, submodule_finalized: bool) -> None:
        if not submodule_finalized:
            show_progress(f"layer {layer_idx + 1} of {layers}")

    model.layer_callback = layer_complete
    sequences = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids.tolist()]
    model.quantize(
        sequences, batch_size=BATCH_SEQUENCES, calibration_sort=None, calibration_data_min_length=1,
        backend=BACKEND.TORCH,
    )  # fmt: skip
    model.save(str(folder))
    return model.quant_log


def tokens_per_expert(log: Sequence[dict], num_experts: int) -> dict[int, list[int]]:
    """Decoder layer -> tokens that reached each expert's down projection."""
    counts: dict[int, list[int]] = {}
    for row in log:
        *_, expert, name = row["module"].split(".")
        if name == _PROJECTIONS["down"]:
            seen = int(row.get("activation_raw_tokens", row["samples"]))
            counts.setdefault(int(row["layer"]), [0] * num_experts)[int(expert)] = seen
    return dict(sorted(counts.items()))


def without_calibration(log: Sequence[dict]) -> list[str]:
    """Matrices that gptqmodel rounded to nearest, by its own log."""
    plain = (row for row in log if "fallback" in str(row["loss"]) or row["loss"] == "not applicable")
    return sorted(f"layers.{row['layer']}.{row['module']}" for row in plain)


def main() -> None:
    arguments = job_arguments(__doc__.splitlines()[0], tuple(_BITS))
    method, bits = arguments.method, arguments.bits
    if bits not in _BITS[method]:
        raise UserError(f"{method} has no {bits}-bit form: choose one of {', '.join(map(str, _BITS[method]))}")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(arguments.source)
    ids = read_calibration(arguments.calibration, config.vocab_size)
    groups = group_sizes(method, config)
    if method == "awq":
        from specter_lab.compress.gptqmodel_awq import fit_to_routed_experts

        fit_to_routed_experts()
    with appearing(arguments.destination) as folder:
        start = time.monotonic()
        log = quantize(arguments.source, folder, method, bits, groups, ids)
        report = JobReport(
            quantizer=f"gptqmodel-{method}",
            bits=bits,
            group_sizes=groups,
            packages=package_versions("gptqmodel", "torch", "transformers"),
            seconds=round(time.monotonic() - start, 1),
            calibration_tokens=ids.size,
            tokens_per_expert=tokens_per_expert(log, adapter_for(config).num_experts(config)),
            fallback=without_calibration(log),
            notes=_NOTES[method],
        )
        write_report(folder, report)


if __name__ == "__main__":
    exit_after(main)
