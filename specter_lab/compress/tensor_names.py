"""How checkpoints on disk name routed experts and routers, and the tensors that are neither."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

EXPERT = re.compile(r"layers\.(\d+)\..*\bexperts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.(\w+)$")
PROJECTIONS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
ROUTER = re.compile(r"layers\.\d+\.(mlp|block_sparse_moe|feed_forward)\.(gate|router)\.(\w+)$")
GGUF_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight$")
GGUF_ROUTER = re.compile(r"blk\.\d+\.ffn_gate_inp\.weight$")


def other_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an unquantised checkpoint that is not a routed expert, one at a time, as stored."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if not re.search(r"\bexperts\.", name):  # \b: shared_experts are not routed experts
                    yield name, file.get_tensor(name)
