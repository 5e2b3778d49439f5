"""A Transformers model whose routed experts come from a store: everything else is loaded, the experts never are as a whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from specter_lab.engine.store.layout import REST
from specter_lab.engine.store.verify import verify
from specter_lab.engine.zipmoe.runtime import ExpertRuntime
from specter_lab.engine.zipmoe.settings import ZIPMOE, Settings
from specter_lab.errors import UserError
from specter_lab.models.adapters import adapter_for
from specter_lab.models.load import read_config, read_tokenizer
from specter_lab.plan.zipmoe.popularity import Popularity, uniform


class StoreExperts(nn.Module):
    """The experts of one layer: asks `serve` instead of holding weights."""

    def __init__(self, layer: int, activation: Callable[[Tensor], Tensor], serve: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.act_fn, self.serve = layer, activation, serve

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.serve(self.layer, hidden_states, top_k_index, top_k_weights, self.act_fn)


@dataclass(frozen=True)
class Served:
    """A model whose experts somebody serves."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    runtime: ExpertRuntime | None  # None: served otherwise (baselines)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_) -> None:
        if self.runtime is not None:
            self.runtime.close()


def open_store(
    store: Path, budget_bytes: int, *, settings: Settings = ZIPMOE, popularity: Popularity | None = None,
    batch: int = 1, check: bool = True,
) -> Served:  # fmt: skip
    """A model that computes from a store under a budget.

    Args:
        store: folder made by `specter-lab pack`.
        budget_bytes: of all memory for experts, staging included.
        settings: of the runtime.
        popularity: of the experts; None: nothing is known.
        batch: requests that are decoded together, as the planner expects.
        check: read everything once and compare checksums first.

    Raises:
        UserError: damaged store, or too small a budget.
    """
    if check:
        verify(store)
    config = read_config(store)
    adapter = adapter_for(config)
    experts = adapter.num_experts(config)
    model = skeleton(store)
    layers = adapter.moe_layers(model)
    known = popularity or uniform(len(layers), experts, config.num_experts_per_tok)
    runtime = ExpertRuntime(store, budget_bytes, settings, known, batch)
    serve_experts(model, runtime.layer)
    runtime.foresee({layer.index: _chosen(layer.router) for layer in layers})
    return Served(model, read_tokenizer(store, config.vocab_size), runtime)


def _chosen(router: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda hidden: router(hidden)[2]


def serve_experts(model: PreTrainedModel, serve: Callable[..., Tensor]) -> None:
    """Replace every layer's experts; `serve(layer, hidden, indices, weights, activation)` computes in their place."""
    for layer in adapter_for(model.config).moe_layers(model):
        model.model.layers[layer.index].mlp.experts = StoreExperts(layer.index, layer.experts.act_fn, serve)


def skeleton(store: Path) -> PreTrainedModel:
    """The model without experts' weights: those tensors have no memory; all others come from the store, strictly.

    Raises:
        UserError: tensors are missing or left over.
    """
    config = read_config(store)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    adapter = adapter_for(config)
    tensors = {_in_memory(name, adapter, config): tensor for name, tensor in load_file(store / REST).items()}
    experts = {f"{name}." for name, module in model.named_modules() if name.endswith(".experts")}
    expected = {n for n, _ in model.named_parameters() if not n.startswith(tuple(experts))}
    wrong = (expected ^ tensors.keys()) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    if wrong:
        raise UserError(f"{store / REST} does not fit its config.json (e.g. '{min(wrong)}'): pack the model again")
    wide = [
        *(getattr(model, "_keep_in_fp32_modules", None) or ()),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
    ]
    tensors = {name: t.float() if any(part in name for part in wide) else t for name, t in tensors.items()}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def _in_memory(name: str, adapter, config: PretrainedConfig) -> str:
    """The name in memory of a tensor in a checkpoint."""
    if adapter.checkpoint_block != "mlp":
        name = name.replace(f".{adapter.checkpoint_block}.", ".mlp.")
    return re.sub(r"\.mlp\.gate\.", f".mlp.{adapter.router}.", name)


@dataclass(frozen=True)
class Generation:
    """Greedy continuations and when each step was done."""

    tokens: Tensor  # [B, N]
    step_s: tuple[float, ...]  # [N] the first is the prompt's

    @property
    def ttft_s(self) -> float:
        return self.step_s[0]

    @property
    def tpot_s(self) -> float:
        """Seconds per step after the first, the mean."""
        return sum(self.step_s[1:]) / (len(self.step_s) - 1)

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together, the prompt's time included."""
        return self.tokens.numel() / sum(self.step_s)


@torch.inference_mode()
def generate(
    model: PreTrainedModel, ids: Tensor, new_tokens: int, *, on_logits: Callable[[Tensor], None] = lambda _: None
) -> Generation:
    """Greedy decoding of prompts [B, S] of one length; `on_logits` sees every step's [B, V]."""
    cache, seconds, chosen, inputs = DynamicCache(config=model.config), [], [], ids
    for _ in range(new_tokens):
        start = perf_counter()
        logits = model(input_ids=inputs, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]  # [B, V]
        inputs = logits.argmax(dim=-1, keepdim=True)
        seconds.append(perf_counter() - start)
        chosen.append(inputs)
        on_logits(logits)
    return Generation(torch.cat(chosen, dim=1), tuple(seconds))
