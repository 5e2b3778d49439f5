"""The recipe of the zoo's translation models: its numbers, the loss and the loop.

Parameters are float32, the forward pass runs under BF16 autocast on a GPU, and the weights kept are those with the lowest
validation loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, SwitchTransformersForConditionalGeneration

from specter_lab.models.zoo.grouped_switch import GroupedSwitchMLP, group_experts
from specter_lab.models.zoo.translation import IGNORED, PAD, SHAPES, Examples, epoch


@dataclass(frozen=True)
class TranslationRecipe:
    """Everything that determines the weights, besides the pairs and the shape."""

    steps: int = 10_000
    batch_tokens: int = 8192  # padded tokens a side
    max_tokens: int = 96  # longer pairs are left out
    lr: float = 2e-3  # peak, cosine to a twentieth
    embedding_lr: float = 8.0  # times lr: embeddings start at unit scale, matrices at d^-0.5
    warmup_steps: int = 400
    weight_decay: float = 0.05  # matrices only
    betas: tuple[float, float] = (0.9, 0.98)
    clip_norm: float = 1.0
    label_smoothing: float = 0.1
    balance: float = 0.02  # weight of the load-balancing loss, per layer
    checks: int = 20  # times that the validation loss is taken
    limit_s: float = 240.0  # fewer steps where the first ones say that all would take longer
    seed: int = 0

    def lr_at(self, step: int, steps: int) -> float:
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        return self.lr * (0.05 + 0.475 * (1 + math.cos(math.pi * progress)))


TOY = TranslationRecipe(steps=40, batch_tokens=1024, max_tokens=48, warmup_steps=8, checks=2)
LARGE = TranslationRecipe(steps=4000, batch_tokens=16_384, lr=7e-4)
TIMED_STEPS = (20, 60)  # the steps between these two tell how many fit into the limit


@dataclass(frozen=True)
class Progress:
    """One line of the loss curve."""

    step: int
    loss: float  # nats per target token with label smoothing, this step
    balance: float  # mean over layers; 1.0 = perfectly even
    validation: float  # nats per target token, both directions
    seconds: float


def build(shape: str, seed: int, device: str) -> PreTrainedModel:
    """A freshly initialised model in float32 with grouped experts, in training mode."""
    torch.manual_seed(seed)
    model = SwitchTransformersForConditionalGeneration(SHAPES[shape])
    for block in (*model.encoder.block, *model.decoder.block):
        if block.is_sparse:  # unit logits; the class's own initialisation sends nearly every token to one expert
            torch.nn.init.normal_(block.layer[-1].mlp.router.classifier.weight, std=model.config.d_model**-0.5)
    group_experts(model)
    return model.to(device).train()


def loss_of(model: PreTrainedModel, grouped: dict[str, list[GroupedSwitchMLP]], sources: Tensor, targets: Tensor,
            label_smoothing: float = 0.0) -> Tensor:  # fmt: skip
    """Mean cross-entropy per target token; the grouped layers learn which tokens are real."""
    attended, real = sources != PAD, targets != IGNORED  # [B, T]
    for side, mask in (("encoder", attended), ("decoder", real)):
        for layer in grouped[side]:
            layer.real = mask
    shifted = F.pad(targets[:, :-1].clamp(min=PAD), (1, 0), value=PAD)  # starts with the pad token, as the class does
    with torch.autocast(sources.device.type, dtype=torch.bfloat16, enabled=sources.is_cuda):
        logits = model(
            input_ids=sources, attention_mask=attended.long(), decoder_input_ids=shifted, use_cache=False
        ).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED,
                           label_smoothing=label_smoothing)  # fmt: skip


def layers_of(model: PreTrainedModel) -> dict[str, list[GroupedSwitchMLP]]:
    """The grouped layers of each side."""
    return {
        side: [module for module in getattr(model, side).modules() if isinstance(module, GroupedSwitchMLP)]
        for side in ("encoder", "decoder")
    }


@torch.no_grad()
def validate(model: PreTrainedModel, examples: Examples, batch_tokens: int) -> tuple[float, Tensor]:
    """(nats per target token, load [L, E] of each expert divided by its fair share, encoder layers first)."""
    grouped = layers_of(model)
    layers = grouped["encoder"] + grouped["decoder"]
    loss_sum, tokens, load = 0.0, 0, 0.0
    model.eval()
    for rows in epoch(examples, batch_tokens, torch.Generator().manual_seed(0)):
        sources, targets = examples.batch(rows)
        count = int((targets != IGNORED).sum())
        loss_sum += float(loss_of(model, grouped, sources, targets)) * count
        load += torch.stack([layer.load * layer.real.sum() for layer in layers]).double().cpu()  # [L, E] tokens
        tokens += count
    model.train()
    return loss_sum / tokens, load / load.mean(1, keepdim=True)


def train(model: PreTrainedModel, examples: Examples, validation: Examples, recipe: TranslationRecipe,
          on_log: Callable[[Progress, int], None]) -> int:  # fmt: skip
    """Train in place and end with the weights of the lowest validation loss; return the number of steps.

    `on_log` gets each line of the curve and the number of steps that will be done.

    Raises:
        FloatingPointError: the loss is no longer finite.
    """
    on_gpu = examples.sources.is_cuda
    parameters = [p for p in model.parameters() if p.requires_grad]
    embedding = model.get_input_embeddings().weight
    optimizer = torch.optim.AdamW(
        [
            {"params": [embedding], "weight_decay": 0.0, "factor": recipe.embedding_lr},
            {"params": [p for p in parameters if p.ndim >= 2 and p is not embedding], "weight_decay": recipe.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=recipe.lr, betas=recipe.betas, fused=on_gpu,
    )  # fmt: skip
    grouped = layers_of(model)
    layers = grouped["encoder"] + grouped["decoder"]
    generator = torch.Generator().manual_seed(recipe.seed)
    batches = iter(())
    steps, best_loss, best = recipe.steps, math.inf, {}
    began = timed_from = time.perf_counter()
    step = 0
    while step < steps:
        rows = next(batches, None)
        if rows is None:
            batches = epoch(examples, recipe.batch_tokens, generator)
            continue
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr_at(step, steps) * group.get("factor", 1.0)
        loss = loss_of(model, grouped, *examples.batch(rows), recipe.label_smoothing)
        balance = torch.stack([layer.balance for layer in layers]).sum()
        (loss + recipe.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(parameters, recipe.clip_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step in TIMED_STEPS:
            loss.item()  # wait for the device
            now = time.perf_counter()
            if step == TIMED_STEPS[1]:
                step_s = (now - timed_from) / (TIMED_STEPS[1] - TIMED_STEPS[0])
                steps = min(steps, max(step, int((recipe.limit_s - (now - began)) / step_s)))
            timed_from = now
        if step % max(1, steps // recipe.checks) == 0 or step == steps:
            nats, _ = validate(model, validation, recipe.batch_tokens)
            if not math.isfinite(nats):
                raise FloatingPointError(f"training diverged before step {step}: validation loss {nats}")
            if nats < best_loss:
                best_loss = nats
                best = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
            on_log(Progress(step, loss.item(), balance.item() / len(layers), nats, time.perf_counter() - began), steps)
    model.load_state_dict(best)
    return steps
