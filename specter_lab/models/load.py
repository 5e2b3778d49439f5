"""Strict loading: every tensor of the file is used, every parameter of the model comes from the file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)  # fmt: skip
from transformers.utils.logging import disable_progress_bar

from specter_lab.errors import NotTrained, UserError
from specter_lab.files import sha256_of
from specter_lab.models.adapters import Adapter, adapter_for
from specter_lab.models.geometry import GEOMETRY
from specter_lab.models.packed import MANIFEST, unpacked
from specter_lab.paths import ZOO

disable_progress_bar()  # one bar per loaded model would bury the experiment's own

ZOO_MODELS = ("qwen-nano", "phi-nano", "deepseek-nano", "dense-nano")
TRANSLATORS = ("switch-nano",)
PROXIES = ("qwen-proxy", "phi-proxy", "deepseek-proxy")  # as deep as the originals; trained by the user, not shipped
DECIDING_FILES = ("config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json")  # beside the weights


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
    """Local folder of a zoo model or proxy, a path, or a hub id (downloaded, or found in the hub cache when offline).

    Raises:
        UserError: nothing by that name can be found here.
    """
    if name in ZOO_MODELS or name in (*TRANSLATORS, *PROXIES) and (ZOO / name).is_dir():
        return unpacked(ZOO / name)
    if Path(name).is_dir():
        return unpacked(Path(name))
    if name in TRANSLATORS:
        raise NotTrained(f"{name} is not in data/zoo: on a CUDA GPU `.venv/bin/python -m specter_lab.models.zoo.train_translation` "
                        f"trains it in five minutes")  # fmt: skip
    if name in PROXIES:
        raise NotTrained(f"{name} is not in data/zoo: proxies are trained, not shipped; on a CUDA GPU `.venv/bin/python -m "
                        f"specter_lab.models.zoo.train {name}` makes it, or name models you have (MODELS=path/to/folder)")  # fmt: skip
    if "/" not in name or name.startswith((".", "/")):
        raise UserError(
            f"no model '{name}': give one of {', '.join(ZOO_MODELS)}, a folder, or a hub id like 'org/name'"
        )
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


def weight_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


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
    if manifest_path.exists() or folder.parent == ZOO:
        try:
            listed = json.loads(manifest_path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{manifest_path} is missing or damaged: restore it with `git checkout`") from error
        for name, expected in listed.items():
            actual = hashes.get(name) or (sha256_of(folder / name) if (folder / name).exists() else "missing")
            if actual != expected:
                raise UserError(
                    f"{folder / name} is not the published file (sha256 {actual[:12]}, expected {expected[:12]}): "
                    f"restore it with `git checkout -- {folder.name}` in its parent folder (in a cache: remove {folder}), "
                    f"or download it again"
                )
    return hashlib.sha256(repr(hashes).encode()).hexdigest()


def read_config(folder: Path) -> PretrainedConfig:
    """The config of a checkpoint.

    Raises:
        UserError: missing, damaged, or of no class that the installed transformers has.
    """
    if not (folder / "config.json").exists():
        raise UserError(f"no config.json in {folder}: this folder is not a checkpoint")
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # what transformers raises depends on how the file is wrong
        raise UserError(f"cannot make sense of {folder / 'config.json'} ({str(error).splitlines()[0]}): it is damaged, "
                        f"or of no class that the installed transformers has") from error  # fmt: skip


def read_tokenizer(folder: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint whose model has `vocab_size` tokens.

    Raises:
        UserError: missing, damaged, or with more tokens than the model.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found = tokenizer("a")["input_ids"]
    except Exception as error:  # as above
        raise UserError(f"cannot read the tokenizer in {folder} ({type(error).__name__}): copy tokenizer.json and "
                        f"tokenizer_config.json of the model into it") from error  # fmt: skip
    if not found:
        raise UserError(f"no tokenizer in {folder}: copy tokenizer.json of the model into it")
    if len(tokenizer) > vocab_size:
        raise UserError(f"the tokenizer in {folder} has {len(tokenizer)} tokens, the model {vocab_size}: copy the "
                        f"model's own tokenizer into it")  # fmt: skip
    return tokenizer


def placement(name: str) -> dict[str, torch.dtype | str]:
    """`dtype` and `device` for `load` where an experiment takes any model by name.

    Shipped models stay in float32 on the CPU, so that their figures depend on no GPU. Others go to the GPU if there is
    one, in bfloat16: what they are stored in, and the one type for which torch multiplies all experts in one launch.
    """
    if name in ZOO_MODELS or not torch.cuda.is_available():
        return {"dtype": torch.float32, "device": "cpu"}
    return {"dtype": torch.bfloat16, "device": "cuda"}


def check_device(device: str) -> None:
    """Raise UserError when nothing can be computed on a torch device of this name here."""
    try:
        torch.ones(1, device=device).item()
    except Exception as error:  # torch has a type of its own for every way in which a device can be missing
        there = "'cpu' or 'cuda'" if torch.cuda.is_available() else "'cpu', the only one here"
        raise UserError(f"no device '{device}' on this machine: give {there}") from error


def check_finite(model: PreTrainedModel, where: str) -> None:
    """Raise UserError when a weight is NaN or infinite; the message names the tensor and the checkpoint."""
    for name, weight in model.named_parameters():
        if not weight.sum().isfinite() and (bad := (~weight.isfinite()).nonzero()).numel():  # the sum takes no memory
            raise UserError(f"{where}: {len(bad):,} of {weight.numel():,} values of '{name}' are not finite, the first at "
                            f"{bad[0].tolist()}: the file is damaged, fetch it again")  # fmt: skip


def _read_weights(auto_class: type, folder: Path, name: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a folder, with nothing missing, unexpected or unused."""
    try:
        model, report = auto_class.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"cannot read the weights in {folder} ({error}): the file is damaged, fetch it again"
        ) from error
    except (RuntimeError, KeyError) as error:
        raise UserError(f"the weights in {folder} have other shapes than its config.json says, or experts are missing: "
                        f"fetch both again from one place") from error  # fmt: skip
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise UserError(f"{name}: {len(report[kind])} {kind.replace('_', ' ')} in the checkpoint, e.g. "
                            f"'{sorted(map(str, report[kind]))[0]}': its files do not belong to its config.json")  # fmt: skip
    return model


@dataclass(frozen=True)
class LoadedTranslator:
    """A Switch encoder-decoder ready to translate: evaluation mode, gradients off."""

    name: str
    path: Path
    digest: str  # as of `LoadedModel`
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_translator(name: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LoadedTranslator:
    """Load `switch-nano` or the folder of another Switch translator of the same recipe, strictly as `load` does.

    Raises:
        UserError: as `load`, or another class of model.
    """
    check_device(device)
    folder = resolve(name)
    config = read_config(folder)
    if config.model_type != "switch_transformers":
        raise UserError(f"{name} is a {config.model_type} model: a switch_transformers translator is needed, e.g. {TRANSLATORS[0]}")  # fmt: skip
    digest = checkpoint_digest(folder)
    model = _read_weights(AutoModelForSeq2SeqLM, folder, name, dtype)
    check_finite(model, str(folder))
    model.eval().requires_grad_(False).to(device)
    return LoadedTranslator(shown_name(name), folder, digest, model, read_tokenizer(folder, config.vocab_size))


def load(name: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LoadedModel:
    """Load a zoo model, a local checkpoint or a hub id, with nothing missing, unexpected or unused.

    Args:
        name: zoo name (`qwen-nano`), folder, or hub id.
        dtype: BF16 files are upcast to float32 by default, which is exact; routers stay in float32 where the
            architecture says so.
        device: torch device of the weights.

    Raises:
        UserError: no such device, unknown name, no network, damaged or altered file, no adapter, keys that do not match,
            or a weight that is not finite.
    """
    check_device(device)
    folder = resolve(name)
    config = read_config(folder)
    adapter = adapter_for(config)
    if config.num_experts_per_tok > adapter.num_experts(config):
        raise UserError(f"{folder / 'config.json'} asks for {config.num_experts_per_tok} of "
                        f"{adapter.num_experts(config)} experts per token: this config is not of a real model")  # fmt: skip
    digest = checkpoint_digest(folder)
    model = _read_weights(AutoModelForCausalLM, folder, name, dtype)
    expected = next((g.parameters for g in GEOMETRY.values() if name in (g.name, g.hub_id)), None)
    actual = sum(p.numel() for p in model.parameters())
    if expected is not None and actual != expected:
        raise UserError(
            f"{name} has {actual:,} parameters, its geometry row says {expected:,}: not the model it claims"
        )
    check_finite(model, str(folder))
    model.eval().requires_grad_(False).to(device)
    return LoadedModel(shown_name(name), folder, digest, model, read_tokenizer(folder, config.vocab_size), adapter)
