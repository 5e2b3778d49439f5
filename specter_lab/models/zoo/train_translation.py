"""Train the zoo's translation model: `python -m specter_lab.models.zoo.train_translation [--out DIR] [--toy] [--large]`.

Writes a complete Hugging Face folder (`switch-nano`, or `switch-large` for GPU rows): config, BF16 weights, tokenizer,
training record, model card and a manifest of hashes. Needs the pairs of `specter_lab.models.zoo.pairs`; no network.
The weights kept are those with the lowest validation loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast, SwitchTransformersForConditionalGeneration

from specter_lab.errors import UserError
from specter_lab.files import sha256_of
from specter_lab.models.zoo import translation_card
from specter_lab.models.zoo.grouped_switch import GroupedSwitchMLP, group_experts, ungroup_experts
from specter_lab.models.zoo.pairs import DEFAULT_DIR, Pair, read_pairs
from specter_lab.models.zoo.train import hardware, write_folder
from specter_lab.models.zoo.translation import (
    DIRECTIONS,
    IGNORED,
    PAD,
    SHAPES,
    Examples,
    encode_sources,
    epoch,
    padded,
    pair_tokenizer,
    sides,
)  # fmt: skip
from specter_lab.paths import ZOO

SAMPLES = 256  # test sentences per direction that the record states exact matches of


@dataclasses.dataclass(frozen=True)
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
TOY_PAIRS = 2000
LARGE = TranslationRecipe(steps=4000, batch_tokens=16_384, lr=7e-4)
TIMED_STEPS = (20, 60)  # the steps between these two tell how many fit into the limit


@dataclasses.dataclass(frozen=True)
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


@torch.no_grad()
def translate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[str], direction: str,
              max_tokens: int) -> list[str]:  # fmt: skip
    """Greedy translations by the class's own `generate`."""
    sources = padded(encode_sources(tokenizer, texts, direction)).to(model.device)
    for layer in (layer for side in layers_of(model).values() for layer in side):
        layer.real = None
    with torch.autocast(sources.device.type, dtype=torch.bfloat16, enabled=sources.is_cuda):
        out = model.generate(input_ids=sources, attention_mask=(sources != PAD).long(), max_new_tokens=max_tokens,
                             num_beams=1, do_sample=False)  # fmt: skip
    return [text.strip() for text in tokenizer.batch_decode(out, skip_special_tokens=True)]


def samples(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, pairs: list[Pair], max_tokens: int) -> dict:
    """Per direction: share of exact matches among the first test sentences, and five translations to look at."""
    found = {}
    for direction in DIRECTIONS:
        texts, references = zip(*(sides(pair, direction) for pair in pairs[:SAMPLES]))
        ours = translate(model, tokenizer, list(texts), direction, max_tokens)
        exact = sum(one == reference for one, reference in zip(ours, references)) / len(ours)
        shown = [dict(source=s, reference=r, ours=o) for s, r, o in list(zip(texts, references, ours))[:5]]
        found[direction] = dict(exact_match=round(exact, 4), shown=shown)
    return found


def run(shape: str, recipe: TranslationRecipe, pairs_dir: Path, out: Path, toy: bool = False) -> dict:
    """Train one model and write its folder; return its record."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pairs, held = read_pairs("train", pairs_dir), read_pairs("validation")
    if toy:
        pairs, held = pairs[:TOY_PAIRS], held[:100]
    tokenizer = pair_tokenizer(pairs)
    model = build(shape, recipe.seed, device)
    examples = Examples.of(pairs, tokenizer, recipe.max_tokens, device)
    validation = Examples.of(held, tokenizer, recipe.max_tokens, device)
    curve: list[Progress] = []
    bar = tqdm(total=recipe.steps, desc=f"train {shape}", mininterval=5)

    def on_log(progress: Progress, steps: int) -> None:
        curve.append(progress)
        bar.total = steps
        bar.update(progress.step - bar.n)
        bar.set_postfix(
            loss=f"{progress.loss:.3f}", validation=f"{progress.validation:.3f}", balance=f"{progress.balance:.2f}"
        )

    steps = train(model, examples, validation, recipe, on_log)
    bar.close()
    with torch.no_grad():  # what is shipped is BF16, so that is what is measured
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    nats, load = validate(model, validation, recipe.batch_tokens)
    model.eval()
    shown = samples(model, tokenizer, read_pairs("test"), recipe.max_tokens)
    ungroup_experts(model)
    record = dict(
        name=shape, parameters=sum(p.numel() for p in model.parameters()), num_experts=model.config.num_experts,
        recipe=dataclasses.asdict(recipe), steps=steps, pairs=len(pairs), examples=len(examples.widths),
        pairs_sha256=sha256_of(pairs_dir / "train.jsonl.xz"), seconds=round(curve[-1].seconds, 1), hardware=hardware(device),
        torch=torch.__version__, transformers=transformers.__version__, validation_nats_per_token=round(nats, 4),
        expert_load_share=[[round(share, 3) for share in layer] for layer in load.tolist()], samples=shown,
        loss_curve=[{k: round(v, 4) for k, v in dataclasses.asdict(point).items()} for point in curve],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        out.mkdir(parents=True, exist_ok=True)
        write_folder(model, Path(folder), record, translation_card.render(record), out / shape)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=ZOO, help="folder that gets the model's folder (default: %(default)s)"
    )
    parser.add_argument("--pairs", type=Path, default=DEFAULT_DIR)
    parser.add_argument("--toy", action="store_true", help="a few steps, to see that it runs (any machine)")
    parser.add_argument("--large", action="store_true", help="switch-large, which is not shipped")
    args = parser.parse_args()
    if not args.toy and not torch.cuda.is_available():
        raise UserError("training needs a CUDA GPU (minutes there, a day here): use --toy for a trial on a CPU")
    shape = "switch-large" if args.large else "switch-nano"
    recipe = TOY if args.toy else LARGE if args.large else TranslationRecipe()
    record = run(shape, recipe, args.pairs, args.out, args.toy)
    load = record["expert_load_share"]
    print(f"{shape}: {record['steps']} steps in {record['seconds']} s, validation {record['validation_nats_per_token']} nats "
          f"per token, expert load {min(map(min, load)):.2f} to {max(map(max, load)):.2f} of fair")  # fmt: skip
    for direction, found in record["samples"].items():
        print(f"{direction}: {found['exact_match']:.1%} exact")
        for one in found["shown"]:
            print(f"  {one['source']}\n    reference: {one['reference']}\n    ours:      {one['ours']}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
