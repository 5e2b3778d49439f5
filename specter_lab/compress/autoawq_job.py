"""AWQ by autoawq, as a process of its own in an environment of its own (autoawq.lock), routed experts only.

    .venv-autoawq/bin/python -m specter_lab.compress.autoawq_job SOURCE DESTINATION --method awq --bits 4 \\
        --calibration ids.npy

autoawq 0.2.9 works with transformers up to 4.56.2, so nothing here imports a module of specter_lab that needs a newer
one. Of the zoo's architectures it knows DeepSeek-V2. It quantises attention along with the experts, or stops when told
not to; here its model definition is asked for the scaling groups of the routed experts only.

The destination is the packed checkpoint that autoawq saves, plus report.json. Its router and shared experts are not
compensated for the scales in post_attention_layernorm: take its experts through `compress.awq`.
"""

from __future__ import annotations

import os

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from awq import AutoAWQForCausalLM
from awq.models.deepseek_v2 import DeepseekV2AWQForCausalLM
from awq.quantize.quantizer import AwqQuantizer
from torch import Tensor, nn
from torch.nn import functional

from specter_lab.compress.job import (
    AWQ_CLIP_BLOCK_ROWS,
    AWQ_CLIP_TOKENS,
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

MODEL_TYPE = "deepseek_v2"
BITS = 4
SEARCH_SEQUENCES = 16  # about so many are enough to choose among 20 scales; gptqmodel's search takes as many
NOT_EXPERTS = ["self_attn", "shared_experts", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
NOTES = (
    "group size is the greatest power of two up to 128 that divides the row; arithmetic in the checkpoint's own type; "
    "scales of gate and up are searched on 16 to 31 sequences, clipping on 128 to 255 tokens; scales are in "
    "post_attention_layernorm, not compensated in router and shared experts: read the experts through "
    "specter_lab.compress.awq"
)


class _Features(dict):
    """Inputs of each linear layer, None for one that was not watched or got no token."""

    def __missing__(self, name: str) -> None:
        return None


def _copy_values(_module: nn.Module, state_dict: dict[str, Tensor], *_) -> None:
    for name, value in state_dict.items():
        state_dict[name] = value.clone()


class RoutedExpertsQuantizer(AwqQuantizer):
    """autoawq's quantiser on a CPU and on rows of any width.

    An expert without calibration tokens gets its layer's scales and no clipping.
    """

    def __init__(self, *args, **kwargs) -> None:
        self.tokens_per_expert: dict[int, list[int]] = {}
        self.fallback: list[str] = []
        super().__init__(*args, **kwargs)

    def _get_input_feat(self, layer: nn.Module, named_linears: dict[str, nn.Linear]) -> _Features:
        index = next(i for i, module in enumerate(self.modules) if module is layer)
        features = _Features(super()._get_input_feat(layer, named_linears))
        if named_linears:
            names = [f"mlp.experts.{e}.down_proj" for e in range(len(layer.mlp.experts))]
            self.tokens_per_expert[index] = [0 if features[name] is None else len(features[name]) for name in names]
            self.fallback += [f"layers.{index}.{name}" for name in names if features[name] is None]
        show_progress(f"layer {index + 1} of {len(self.modules)}")
        return features

    def _use_group_of(self, in_features: int) -> None:
        self.group_size = awq_group(in_features)

    def _search_best_scale(self, module, prev_op, layers, *args, **kwargs):
        self._use_group_of(layers[0].in_features)
        return super()._search_best_scale(module, prev_op, layers, *args, **kwargs)

    def _compute_best_scale(self, x, w_mean, x_mean, module2inspect, *args):
        # The search restores weights from `.cpu()` of the state, on a CPU the very tensors that it scales in place.
        hook = module2inspect.register_state_dict_post_hook(_copy_values)
        try:
            return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *args)
        finally:
            hook.remove()

    def _search_best_clip(self, layer, named_linears, input_feat):
        reached = {name: linear for name, linear in named_linears.items() if input_feat[name] is not None}
        return super()._search_best_clip(layer, reached, input_feat)

    def _compute_best_clip(self, w: Tensor, input_feat: Tensor) -> Tensor:
        self._use_group_of(w.shape[1])
        padded = functional.pad(w, (0, 0, 0, -w.shape[0] % AWQ_CLIP_BLOCK_ROWS))
        return super()._compute_best_clip(padded, input_feat, n_sample_token=AWQ_CLIP_TOKENS)[: w.shape[0]]

    def _apply_quant(self, module, named_linears):
        for name, linear in named_linears.items():
            self._use_group_of(linear.in_features)
            super()._apply_quant(module, {name: linear})


def _routed_experts_only(scaling_groups):
    """Wrap DeepSeek-V2's list of scaling groups: only routed experts that calibration reached."""

    def get_layers_for_scaling(module: nn.Module, input_feat: _Features, module_kwargs: dict) -> list[dict]:
        if not hasattr(module.mlp, "experts"):
            return []
        routed = {id(linear) for linear in module.mlp.experts.modules()}
        groups = []
        for group in scaling_groups(module, input_feat, module_kwargs):
            layers = [linear for linear in group["layers"] if id(linear) in routed]
            inputs = group["inp"]  # [N, T, H] before the router, [T_e, I] in an expert
            if layers and inputs is not None:
                step = max(1, len(inputs) // SEARCH_SEQUENCES) if inputs.dim() == 3 else 1
                groups.append({**group, "layers": layers, "inp": inputs[::step].contiguous()})
        return groups

    return get_layers_for_scaling


def older_config(config: dict) -> dict:
    """A config.json of transformers 5 as transformers 4.56 reads it.

    Raises:
        UserError: rotary positions of another kind than the default.
    """
    rope = config.pop("rope_parameters", None) or {"rope_type": "default"}
    if rope["rope_type"] != "default":
        raise UserError(f"autoawq is not tried with '{rope['rope_type']}' rotary positions: use gptqmodel's AWQ")
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    return config


def quantize(source: Path, folder: Path, ids: np.ndarray) -> RoutedExpertsQuantizer:
    """Quantise the routed experts of `source` with the tokens `ids` [N, T] into `folder`."""
    DeepseekV2AWQForCausalLM.get_layers_for_scaling = staticmethod(
        _routed_experts_only(DeepseekV2AWQForCausalLM.get_layers_for_scaling)
    )
    with tempfile.TemporaryDirectory() as scratch:
        for file in source.iterdir():
            if file.name != "config.json":
                (Path(scratch) / file.name).symlink_to(file.resolve())
        config = older_config(json.loads((source / "config.json").read_text()))
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        model = AutoAWQForCausalLM.from_pretrained(scratch, trust_remote_code=False)
    settings = {"zero_point": True, "q_group_size": GROUP, "w_bit": BITS, "version": "GEMM",
                "modules_to_not_convert": NOT_EXPERTS}  # fmt: skip
    model.quantize(
        None, quant_config=settings, calib_data=ids.tolist(), max_calib_samples=ids.shape[0],
        max_calib_seq_len=ids.shape[1], quantizer_cls=RoutedExpertsQuantizer,
    )  # fmt: skip
    model.save_quantized(str(folder))
    for file in source.glob("tokenizer*.json"):  # of a class that transformers 4.56 does not know
        shutil.copy(file, folder)
    return model.quantizer


def main() -> None:
    arguments = job_arguments(__doc__.splitlines()[0], ("awq",))
    config = json.loads((arguments.source / "config.json").read_text())
    if config["model_type"] != MODEL_TYPE or arguments.bits != BITS:
        raise UserError(f"autoawq quantises {MODEL_TYPE} to {BITS} bits here, not {config['model_type']} to "
                        f"{arguments.bits}: use gptqmodel's AWQ")  # fmt: skip
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    ids = read_calibration(arguments.calibration, config["vocab_size"])
    wide, narrow = awq_group(config["hidden_size"]), awq_group(config["moe_intermediate_size"])
    with appearing(arguments.destination) as folder:
        start = time.monotonic()
        quantizer = quantize(arguments.source, folder, ids)
        report = JobReport(
            quantizer="autoawq",
            bits=BITS,
            group_sizes={"gate": wide, "up": wide, "down": narrow},
            packages=package_versions("autoawq", "torch", "transformers"),
            seconds=round(time.monotonic() - start, 1),
            calibration_tokens=ids.size,
            tokens_per_expert=quantizer.tokens_per_expert,
            fallback=quantizer.fallback,
            notes=NOTES,
        )
        write_report(folder, report)


if __name__ == "__main__":
    exit_after(main)
