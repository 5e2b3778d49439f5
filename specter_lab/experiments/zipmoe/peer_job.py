"""One request to an offloading system that somebody has installed, as a process of its own.

    python -m specter_lab.experiments.zipmoe.peer_job deepspeed CHECKPOINT --ids 5,17,9 --new-tokens 16 --budget-bytes N --folder DIR

The last line of the output is JSON: `ttft_s`, `tpot_s`, `where` the weights lie. Both systems are written for CUDA GPUs;
DeepSpeed also runs without one. The process is theirs: they set global state, and may end it. DeepSpeed 0.19.8 was tried,
without a GPU; MoE-Infinity has not been, its call follows its documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from specter_lab.engine.zipmoe.model import generate
from specter_lab.models.load import read_config


def zero3(checkpoint: Path, ids: Tensor, new_tokens: int, budget_bytes: int, folder: Path) -> dict:
    """DeepSpeed ZeRO-3: parameters in files where its asynchronous I/O is there, else all in host memory, whatever the budget."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    import deepspeed
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from transformers.integrations import HfDeepSpeedConfig

    where = "nvme" if AsyncIOBuilder().is_compatible(verbose=False) else "cpu"
    offload = {"device": where, "pin_memory": torch.cuda.is_available(), "nvme_path": str(folder)}
    config = {
        "train_micro_batch_size_per_gpu": len(ids),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": offload, "stage3_max_live_parameters": budget_bytes // 2,
                              "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    deepspeed.init_distributed()
    kept = HfDeepSpeedConfig(config)  # while this object lives, from_pretrained partitions what it reads
    shape = read_config(checkpoint)
    auto = AutoModelForSeq2SeqLM if shape.is_encoder_decoder else AutoModelForCausalLM
    if hasattr(shape, "router_dtype"):  # Switch casts its router's weights, which does not reach partitioned ones
        shape.router_dtype = "bfloat16"
    model = auto.from_pretrained(checkpoint, config=shape, dtype=torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    marks = [time.perf_counter()]

    def step_done(logits: Tensor) -> None:
        logits.cpu()  # the device is asynchronous
        marks.append(time.perf_counter())

    engine.module.eval()
    generate(engine.module, ids.to(engine.device), new_tokens, on_logits=step_done)
    del kept
    return {"ttft_s": marks[1] - marks[0], "tpot_s": (marks[-1] - marks[1]) / (new_tokens - 1),
            "where": "files" if where == "nvme" else "host memory, all of them"}  # fmt: skip


def moe_infinity(checkpoint: Path, ids: Tensor, new_tokens: int, budget_bytes: int, folder: Path) -> dict:
    """MoE-Infinity: experts in its files under `folder`, the budget as its share of the GPU's memory."""
    from moe_infinity import MoE

    share = budget_bytes / torch.cuda.get_device_properties(0).total_memory
    model = MoE(str(checkpoint), {"offload_path": str(folder), "device_memory_ratio": share})
    seconds = []
    for count in (1, 1, new_tokens):  # the first warms up
        start = time.perf_counter()
        model.generate(ids.to("cuda"), max_new_tokens=count, min_new_tokens=count, do_sample=False).cpu()
        seconds.append(time.perf_counter() - start)
    _, first, all_of_them = seconds
    return {"ttft_s": first, "tpot_s": (all_of_them - first) / (new_tokens - 1), "where": "files"}


JOBS = {"deepspeed": zero3, "moe_infinity": moe_infinity}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", choices=JOBS)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--ids", required=True, help="tokens of the prompt, separated by commas")
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--budget-bytes", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args(arguments)
    ids = torch.tensor([[int(token) for token in options.ids.split(",")]])
    with torch.inference_mode():
        found = JOBS[options.package](options.checkpoint, ids, options.new_tokens, options.budget_bytes, options.folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
