"""Strict loading: every tensor of the file is used, every parameter of the model comes from the file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from specter_lab.errors import UserError
from specter_lab.models.adapters import Adapter, adapter_for
from specter_lab.models.geometry import GEOMETRY
from specter_lab.paths import ZOO

disable_progress_bar()  # one bar per loaded model would bury the experiment's own

ZOO_MODELS = ("qwen-nano", "phi-nano", "deepseek-nano", "dense-nano")
DECIDING_FILES = ("config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json")  # beside the weights
MANIFEST = "MANIFEST.json"  # file name -> sha256, beside the weights of every zoo model


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be measured: evaluation mode, gradients off."""

    name: str
    path: Path
    digest: str  # sha256 over everything that decides what it computes, hexadecimal (checkpoint_digest)
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    adapter: Adapter

    @property
    def num_experts(self) -> int:
        return self.adapter.num_experts(self.model.config)

    @property
    def top_k(self) -> int:
        return self.model.config.num_experts_per_tok


def resolve(name: str) -> Path:
    """Local folder of a zoo model, a path, or a hub id (downloaded, or found in the hub cache when offline).

    Raises:
        UserError: nothing by that name can be found here.
    """
    if name in ZOO_MODELS:
        return ZOO / name
    if Path(name).is_dir():
        return Path(name)
    if "/" not in name or name.startswith((".", "/")):
        raise UserError(f"no model '{name}': give one of {', '.join(ZOO_MODELS)}, a folder, or a hub id like 'org/name'")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))
    except Exception as error:  # the hub client raises a dozen types for "not reachable"
        raise UserError(
            f"cannot fetch '{name}' from the model hub ({type(error).__name__}): download it where there is a network "
            f"and give the folder's path instead"
        ) from error


def shown_name(model: str) -> str:
    """What a model is called in rows and figures: a folder by its last name, everything else as given."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoint_digest(folder: Path) -> str:
    """One sha256 for a checkpoint: weights, config.json and tokenizer; zoo files are checked against their manifest.

    Raises:
        UserError: there are no weights, or a file differs from the manifest.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise UserError(f"no .safetensors files in {folder}: this folder is not a checkpoint")
    others = [folder / name for name in DECIDING_FILES if (folder / name).exists()]
    hashes = {file.name: sha256_of(file) for file in (*weights, *others)}
    manifest_path = folder / MANIFEST
    if manifest_path.exists():
        for name, expected in json.loads(manifest_path.read_text()).items():
            actual = hashes.get(name) or (sha256_of(folder / name) if (folder / name).exists() else "missing")
            if actual != expected:
                raise UserError(
                    f"{folder / name} is not the published file (sha256 {actual[:12]}, expected {expected[:12]}): "
                    f"restore it with `git checkout -- {folder.name}` in its parent folder, or download it again"
                )
    return hashlib.sha256(repr(hashes).encode()).hexdigest()


def load(name: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LoadedModel:
    """Load a zoo model, a local checkpoint or a hub id, with nothing missing, unexpected or unused.

    Args:
        name: zoo name (`qwen-nano`), folder, or hub id.
        dtype: BF16 files are upcast to float32 by default, which is exact; routers stay in float32 where the
            architecture says so.
        device: torch device of the weights.

    Raises:
        UserError: unknown name, no network, damaged or altered file, no adapter, or keys that do not match.
    """
    folder = resolve(name)
    if not (folder / "config.json").exists():
        raise UserError(f"no config.json in {folder}: this folder is not a checkpoint")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, OSError) as error:  # transformers names no architecture, or one that it does not have
        raise UserError(f"cannot make sense of {folder / 'config.json'} ({str(error).splitlines()[0]}): this is not a "
                        f"model of a class that the installed transformers has") from error  # fmt: skip
    adapter = adapter_for(config)
    digest = checkpoint_digest(folder)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read the weights in {folder} ({error}): the file is damaged, fetch it again") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise UserError(f"{name}: {len(report[kind])} {kind.replace('_', ' ')} in the checkpoint, e.g. "
                            f"'{sorted(map(str, report[kind]))[0]}': its files do not belong to its config.json")  # fmt: skip
    expected = next((g.parameters for g in GEOMETRY.values() if name in (g.name, g.hub_id)), None)
    actual = sum(p.numel() for p in model.parameters())
    if expected is not None and actual != expected:
        raise UserError(f"{name} has {actual:,} parameters, its geometry row says {expected:,}: not the model it claims")
    model.eval().requires_grad_(False).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer("a")["input_ids"]:
        raise UserError(f"no tokenizer in {folder}: copy tokenizer.json of the model into it")
    return LoadedModel(shown_name(name), folder, digest, model, tokenizer, adapter)
