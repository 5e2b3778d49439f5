"""Train zoo models and proxies: `python -m specter_lab.models.zoo.train qwen-nano phi-nano deepseek-nano`.

Several models train side by side, one process each. Every process writes a complete Hugging Face folder: config,
BF16 weights, tokenizer, training record, model card and a manifest of hashes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from tqdm import tqdm
from transformers import AutoTokenizer

from specter_lab.errors import UserError
from specter_lab.files import sha256_of
from specter_lab.models.adapters import adapter_for
from specter_lab.models.load import TRANSLATORS, ZOO_MODELS
from specter_lab.models.packed import MANIFEST, pack
from specter_lab.models.zoo import card, recipe
from specter_lab.models.zoo.corpus import read_documents, read_summary
from specter_lab.models.zoo.evaluate import held_out
from specter_lab.models.zoo.shapes import SHAPES
from specter_lab.paths import CACHE, ZOO

END = 2  # </s> closes every document
TOY = recipe.Recipe(tokens=65_536, batch=8, seq_len=128, warmup_steps=8)


def tokenize(corpus: Path, tokenizer_dir: Path, split: str) -> dict[str, np.ndarray]:
    """Token ids [N] uint16 per domain of one split, documents closed by </s>; cached beside the corpus."""
    made_from = f"{sha256_of(corpus / 'corpus.json')[:8]}.{sha256_of(tokenizer_dir / 'tokenizer.json')[:8]}"
    cache = corpus / f"{split}.{made_from}.npz"
    if not cache.exists():
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir).backend_tokenizer
        texts: dict[str, list[str]] = {}
        for document in read_documents(split, corpus):
            texts.setdefault(document["domain"], []).append(document["text"])
        streams = {}
        for domain, documents in sorted(texts.items()):
            parts = []
            for start in tqdm(range(0, len(documents), 1000), desc=f"tokenise {split} {domain}", mininterval=5):
                encoded = tokenizer.encode_batch_fast(documents[start : start + 1000], add_special_tokens=False)
                parts += [np.array(one.ids + [END], dtype=np.uint16) for one in encoded]
            streams[domain] = np.concatenate(parts)
        partial = cache.with_suffix(".partial.npz")
        np.savez(partial, **streams)
        partial.replace(cache)
    with np.load(cache) as file:
        return {domain: file[domain] for domain in file.files}


def as_tensors(streams: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {domain: torch.from_numpy(stream.astype(np.int32)) for domain, stream in streams.items()}


def hardware(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU ({platform.machine()})"


def train_one(name: str, settings: recipe.Recipe, corpus: Path, tokenizer_dir: Path, out: Path) -> None:
    """Train one model and write its folder `out / name` (replacing an older one only when complete)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SHAPES[name]
    streams = tokenize(corpus, tokenizer_dir, "train")
    mixture = recipe.Mixture.of(as_tensors(streams), read_summary(corpus)["mixture"], device)
    model = recipe.build(shape.config, seed=settings.seed, device=device)
    curve: list[dict] = []
    bar = tqdm(total=settings.steps, desc=f"train {name}", mininterval=5)

    def on_log(progress: recipe.Progress) -> None:
        curve.append(dataclasses.asdict(progress))
        bar.update(progress.step + 1 - bar.n)
        bar.set_postfix(loss=f"{progress.loss:.3f}", balance=f"{progress.balance:.3f}")

    recipe.train(model, mixture, settings, log_every=max(1, settings.steps // 200), on_log=on_log)
    bar.close()
    losses, shares = held_out(model.eval(), as_tensors(tokenize(corpus, tokenizer_dir, "heldout")))
    adapter = adapter_for(model.config)
    record = dict(
        name=name, original=shape.original, parameters=sum(p.numel() for p in model.parameters()),
        num_experts=adapter.num_experts(model.config), top_k=model.config.num_experts_per_tok,
        moe_layers=shares.shape[0], recipe=dataclasses.asdict(settings), steps=settings.steps,
        tokens=settings.steps * settings.batch * settings.seq_len, corpus_tokens=len(mixture.stream),
        corpus_sha256=sha256_of(corpus / "corpus.json"), seconds=round(curve[-1]["seconds"], 1), hardware=hardware(device),
        torch=torch.__version__, transformers=transformers.__version__,
        held_out_nats_per_token={d: round(v, 4) for d, v in losses.items()},
        expert_load_share=[[round(v, 3) for v in layer] for layer in shares.tolist()],
        loss_curve=[{k: round(v, 4) for k, v in point.items()} for point in curve],
    )  # fmt: skip
    write_folder(model, tokenizer_dir, record, card.render(record), out / name)
    print(f"{name}: held-out {losses}, expert load {shares.min():.2f} to {shares.max():.2f} of fair", flush=True)


def write_folder(
    model: transformers.PreTrainedModel, tokenizer_dir: Path, record: dict, readme: str, folder: Path
) -> None:
    """A complete Hugging Face folder, put in place at once."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.config.architectures = [type(model).__name__]
    model.to(torch.bfloat16).save_pretrained(partial)
    for file in tokenizer_dir.glob("*.json"):
        shutil.copy(file, partial)
    (partial / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    (partial / "README.md").write_text(readme)
    hashes = {f.name: sha256_of(f) for f in sorted(partial.iterdir()) if f.suffix in (".safetensors", ".json")}
    (partial / MANIFEST).write_text(json.dumps(hashes, indent=1) + "\n")
    if folder.parent == ZOO and folder.name in (*ZOO_MODELS, *TRANSLATORS):
        pack(partial)  # these ship
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def train_side_by_side(names: list[str], arguments: list[str]) -> None:
    """One process per model; the token streams must be cached already."""
    command = [sys.executable, "-m", "specter_lab.models.zoo.train"]
    workers = {name: subprocess.Popen([*command, name, *arguments]) for name in names}
    failed = [name for name, worker in workers.items() if worker.wait() != 0]
    if failed:
        raise UserError(f"training failed for {', '.join(failed)}: the reason stands above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=ZOO_MODELS, help=f"any of {', '.join(SHAPES)}; default: the zoo")
    parser.add_argument("--tokens", type=float, default=recipe.Recipe.tokens, help="training tokens per model")
    parser.add_argument("--toy", action="store_true", help="a few steps, to see that it runs (any machine)")
    parser.add_argument("--corpus", type=Path, default=CACHE / "corpus")
    parser.add_argument("--tokenizer", type=Path, default=ZOO / "tokenizer")
    parser.add_argument("--out", type=Path, default=ZOO)
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in SHAPES]
    if unknown:
        raise UserError(f"no zoo model '{unknown[0]}': choose from {', '.join(SHAPES)}")
    if not args.toy and not torch.cuda.is_available():
        raise UserError("training the zoo needs a CUDA GPU (minutes there, weeks here): use --toy for a trial on a CPU")
    settings = TOY if args.toy else recipe.Recipe(tokens=int(args.tokens))
    for split in ("train", "heldout"):
        tokenize(args.corpus, args.tokenizer, split)
    if len(args.names) > 1:
        rest = sys.argv[1:]
        train_side_by_side(list(args.names), [a for a in rest if a not in args.names])
    else:
        train_one(args.names[0], settings, args.corpus, args.tokenizer, args.out)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
