"""What gptqmodel 7.6.0's AWQ needs to quantise routed experts, and nothing but routed experts, of any width.

Imported by gptqmodel_job only, before a model is loaded. The search for scales and clipping stays gptqmodel's own;
adjusted is what it is applied to:

- Phimoe's definition names no expert projections, so no activations are caught: it gets the names that its modules
  have anyway.
- Qwen2-MoE's definition scales shared and routed experts as one group, and a group with a member that is not
  quantised is left without scales: the shared expert is taken out of the definition.
- There is one group size for all projections, and it must divide every row; the clipping search takes blocks of 64
  output rows. Expert widths of 32 fit neither: the group size becomes the row's own, and missing rows are padded with
  zeros (rows are clipped independently).
- One expert without calibration tokens would leave gate and up of the whole layer without scales and clipping. Here
  it gets the layer's scales, no clipping, and leaves the others alone.
- Scales divided out of the norm are multiplied into the experts only, so router and shared experts would see other
  inputs than before, in this layer and in the calibration of the next ones: they are multiplied by the scales, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from gptqmodel.looper import awq_processor
from gptqmodel.looper.awq_processor import AWQProcessor
from gptqmodel.models.definitions.phi3 import PhiMoEGPTQForCausalLM
from gptqmodel.models.definitions.qwen2_moe import Qwen2MoeQModel
from gptqmodel.models.moe_lifecycle import GateUpDownMoELifecycleHooks
from torch import Tensor, nn
from torch.nn import functional

from specter_lab.compress.job import AWQ_CLIP_BLOCK_ROWS, AWQ_CLIP_TOKENS, awq_group

NORM = "post_attention_layernorm"
OTHER_READERS = (  # modules that read the norm's output and are not routed experts, in any of the architectures
    "gate", "router", "shared_expert_gate", "shared_expert.gate_proj", "shared_expert.up_proj",
    "shared_experts.gate_proj", "shared_experts.up_proj",
)  # fmt: skip


@contextmanager
def _group_of(processor: AWQProcessor, in_features: int) -> Iterator[None]:
    """Let `processor` use the group size of rows of `in_features` inside the block."""
    config = processor.qcfg
    usual = config.group_size
    config.group_size = awq_group(in_features)
    try:
        yield
    finally:
        config.group_size = usual


def _fit_groups_to_rows() -> None:
    search_scale = AWQProcessor._search_best_scale
    compute_clip = AWQProcessor._compute_best_clip
    apply_quant = AWQProcessor.apply_quant

    def search_scale_by_row(self, module, prev_op, layers, *args, **kwargs):
        with _group_of(self, layers[0].weight.shape[1]):
            return search_scale(self, module, prev_op, layers, *args, **kwargs)

    def compute_clip_by_row(self, weight: Tensor, inputs: Tensor) -> Tensor:
        rows, in_features = weight.shape
        if inputs.numel() == 0:  # a starved expert keeps its range
            return weight.abs().unflatten(1, (-1, awq_group(in_features))).amax(dim=2, keepdim=True)  # [out, G, 1]
        padded = functional.pad(weight, (0, 0, 0, -rows % AWQ_CLIP_BLOCK_ROWS))
        with _group_of(self, in_features):
            return compute_clip(self, padded, inputs, n_sample_token=AWQ_CLIP_TOKENS)[:rows]

    def apply_quant_by_row(self, named_linears, scales_list):
        for name, linear in named_linears.items():
            with _group_of(self, linear.weight.shape[1]):
                apply_quant(self, {name: linear}, scales_list)

    AWQProcessor._search_best_scale = search_scale_by_row
    AWQProcessor._compute_best_clip = compute_clip_by_row
    AWQProcessor.apply_quant = apply_quant_by_row


def _keep_layers_with_starved_experts() -> None:
    layer_features = AWQProcessor._layer_input_features
    should_fallback = AWQProcessor._should_fallback_group

    def layer_features_of_all(self, state) -> dict[str, Tensor]:
        features = layer_features(self, state)
        for name, linear in state.modules.items():
            if features[name].numel() == 0:
                features[name] = linear.weight.new_empty(1, 0, linear.weight.shape[1])  # no tokens, but divisible
        return features

    def should_fallback_of_reached(self, layer_names: list[str], input_feat: dict[str, Tensor]) -> bool:
        reached = [name for name in layer_names if name in input_feat and input_feat[name].numel() > 0]
        return not reached or should_fallback(self, reached, input_feat)

    AWQProcessor._layer_input_features = layer_features_of_all
    AWQProcessor._should_fallback_group = should_fallback_of_reached


def _compensate_other_readers() -> None:
    apply_scale = awq_processor.apply_scale

    def apply_scale_everywhere(layer: nn.Module, scales_list, **kwargs):
        apply_scale(layer, scales_list, **kwargs)
        modules = dict(layer.mlp.named_modules())
        for produced_by, _, scales, _ in scales_list:
            if produced_by == NORM:
                for reader in OTHER_READERS:
                    if reader in modules:
                        modules[reader].weight.data.mul_(scales.to(modules[reader].weight))  # [out, H] * [H]

    awq_processor.apply_scale = apply_scale_everywhere


def fit_to_routed_experts() -> None:
    """Apply the adjustments of this module to gptqmodel's classes, for the rest of the process."""
    PhiMoEGPTQForCausalLM.moe_lifecycle_hooks = GateUpDownMoELifecycleHooks()
    Qwen2MoeQModel.module_tree = copy.deepcopy(Qwen2MoeQModel.module_tree)
    del Qwen2MoeQModel.module_tree[-1]["mlp:moe:?"]["shared_expert:0"]
    _fit_groups_to_rows()
    _keep_layers_with_starved_experts()
    _compensate_other_readers()
