"""A Transformers model whose routed experts come from a store: everything else is loaded, the experts never are as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.activations import ACT2FN
from transformers.initialization import no_init_weights

from specter_lab.engine.store.layout import REST
from specter_lab.engine.store.verify import verify
from specter_lab.engine.zipmoe.runtime import ExpertRuntime
from specter_lab.engine.zipmoe.settings import ZIPMOE, Settings
from specter_lab.errors import UserError
from specter_lab.models.load import read_config, read_tokenizer
from specter_lab.models.stacks import Stacks, stacks_of
from specter_lab.plan.zipmoe.popularity import Popularity, uniform

# Tokens [B, 1] of the last step, None at first -> logits [B, V].
Step = Callable[[Tensor | None], Tensor]


class StoreExperts(nn.Module):
    """The experts of one layer: asks `serve` instead of holding weights."""

    def __init__(self, layer: int, stacks: Stacks, serve: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.stacks, self.serve = layer, stacks, serve
        self.act_fn = ACT2FN[stacks.activation]

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return self.serve(self.layer, hidden, self.stacks.indices(chosen), weights, self.act_fn)


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
    model = skeleton(store)
    stacks = stacks_of(model.config)
    sparse = stacks.sparse(model)
    known = popularity or uniform(len(sparse), stacks.num_experts, stacks.top_k)
    runtime = ExpertRuntime(store, budget_bytes, settings, known, batch)
    serve_experts(model, runtime.layer)
    routers = {
        block.number: partial(stacks.route, sparse[block])
        for before, block in pairwise(sparse)
        if before.stack == block.stack  # an encoder's last states are not what the decoder's first router will see
    }
    runtime.foresee(routers)
    return Served(model, read_tokenizer(store, model.config.vocab_size), runtime)


def serve_experts(model: PreTrainedModel, serve: Callable[..., Tensor]) -> None:
    """Replace every layer's experts; `serve(layer, hidden, indices, weights, activation)` computes in their place."""
    stacks = stacks_of(model.config)
    for block, module in stacks.sparse(model).items():
        module.experts = StoreExperts(block.number, stacks, serve)


def skeleton(store: Path) -> PreTrainedModel:
    """The model without experts' weights: those tensors have no memory; all others come from the store, strictly.

    Raises:
        UserError: tensors are missing or left over.
    """
    config = read_config(store)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with init_empty_weights(include_buffers=False), no_init_weights():  # all of them come from the store
        model = auto.from_config(config, dtype=torch.bfloat16)
    stacks = stacks_of(config)
    tensors = {stacks.name_in_memory(name): tensor for name, tensor in load_file(store / REST).items()}
    experts = {f"{name}." for name, module in model.named_modules() if name.endswith(".experts")}
    expected = {n for n, _ in model.named_parameters() if not n.startswith(tuple(experts))}
    wrong = (expected ^ tensors.keys()) - model.all_tied_weights_keys.keys()
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


@dataclass(frozen=True)
class Generation:
    """Greedy continuations, or translations, and when each step was done."""

    tokens: Tensor  # [B, N]
    step_s: tuple[float, ...]  # [N] the first is the prompt's, an encoder's pass included

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
    """Greedy decoding of prompts [B, S] of one length; `on_logits` sees every step's [B, V].

    An encoder-decoder encodes the prompts in the first step, and decodes from its start token on. An end token ends nothing.
    """
    advance = (_translating if model.config.is_encoder_decoder else _continuing)(model, ids)
    seconds, chosen, last = [], [], None
    for _ in range(new_tokens):
        start = perf_counter()
        logits = advance(last)  # [B, V]
        last = logits.argmax(dim=-1, keepdim=True)
        seconds.append(perf_counter() - start)
        chosen.append(last)
        on_logits(logits)
    return Generation(torch.cat(chosen, dim=1), tuple(seconds))


def _continuing(model: PreTrainedModel, ids: Tensor) -> Step:
    cache = DynamicCache(config=model.config)

    def advance(last: Tensor | None) -> Tensor:
        inputs = ids if last is None else last
        return model(input_ids=inputs, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    return advance


def _translating(model: PreTrainedModel, ids: Tensor) -> Step:
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    encoded = None

    def advance(last: Tensor | None) -> Tensor:
        nonlocal encoded
        if last is None:
            encoded = model.get_encoder()(input_ids=ids)
            last = torch.full((len(ids), 1), model.config.decoder_start_token_id, device=ids.device)
        return model(encoder_outputs=encoded, decoder_input_ids=last, cache=cache, use_cache=True).logits[:, -1]

    return advance
