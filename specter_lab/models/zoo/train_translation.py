"""Train the zoo's translation model: `python -m specter_lab.models.zoo.train_translation [--out DIR] [--toy] [--large]`.

Writes a complete Hugging Face folder (`switch-nano`, or `switch-large` for GPU rows): config, BF16 weights, tokenizer,
training record, model card and a manifest of hashes. Needs the pairs of `specter_lab.models.zoo.pairs`; no network.
The weights kept are those with the lowest validation loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from specter_lab.errors import UserError
from specter_lab.files import sha256_of
from specter_lab.models.zoo import translation_card
from specter_lab.models.zoo.grouped_switch import ungroup_experts
from specter_lab.models.zoo.pairs import DEFAULT_DIR, Pair, read_pairs
from specter_lab.models.zoo.train import hardware, write_folder
from specter_lab.models.zoo.translation import (
    DIRECTIONS,
    PAD,
    Examples,
    encode_sources,
    padded,
    pair_tokenizer,
    sides,
)
from specter_lab.models.zoo.translation_recipe import (
    LARGE,
    TOY,
    Progress,
    TranslationRecipe,
    build,
    layers_of,
    train,
    validate,
)
from specter_lab.paths import ZOO

TOY_PAIRS = 2000
SAMPLES = 256  # test sentences per direction that the record states exact matches of


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
