"""The model card of a zoo model, written from its training record."""

from __future__ import annotations

import numpy as np

# rows of the histogram: from, to, in shares of the fair load
BANDS = ((0.0, 0.1), (0.1, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0), (1.0, 1.5), (1.5, 2.0), (2.0, float("inf")))


def _purpose(record: dict) -> str:
    size = f"A {record['parameters'] / 1e6:.1f} M parameter"
    if record["num_experts"] == 1:
        return f"""{size} dense language model, the control beside qwen-nano: the class of {record["original"]} with a single
expert as wide as the experts one token uses there, so every weight serves every token."""
    return f"""{size} Mixture-of-Experts language model with the class and the routing geometry of
{record["original"]}: {record["num_experts"]} routed experts, top-{record["top_k"]}, {record["moe_layers"]} MoE layers."""


def render(record: dict) -> str:
    """Markdown with YAML front matter; every number comes from `record` (training.json)."""
    shares = np.array(record["expert_load_share"])  # [L, E], 1.0 = fair share
    curve = record["loss_curve"]
    shown = [curve[i] for i in sorted({*np.linspace(0, len(curve) - 1, 12).astype(int)})]
    domains = "\n".join(f"| {name} | {nats:.3f} |" for name, nats in record["held_out_nats_per_token"].items())
    rows = "\n".join(
        f"| {point['tokens'] / 1e6:.1f} | {point['loss']:.3f} | {point['balance']:.3f} |" for point in shown
    )
    bars = "\n".join(
        f"| {low:g} - {high:g} | {(count := int(((shares >= low) & (shares < high)).sum()))} | {'#' * round(40 * count / shares.size)} |"
        for low, high in BANDS
    )
    recipe = record["recipe"]
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [mixture-of-experts, research]
---
# {record["name"]}

{_purpose(record)} It was trained from scratch for measuring
routing, quantisation and offloading; it is too small to be useful as a language model, and nothing measured on it may
carry the original's name.

- **Weights**: BF16 safetensors, trained as BF16 (float32 masters in the optimiser).
- **Training**: {record["tokens"] / 1e6:.0f} M tokens in {record["steps"]} steps of {recipe["batch"]} x {recipe["seq_len"]} (about {record["tokens"] / record["corpus_tokens"]:.1f} passes over {record["corpus_tokens"] / 1e6:.1f} M tokens), AdamW,
  peak learning rate {recipe["lr"]:g} with cosine decay, load-balancing loss {recipe["balance"]:g} per layer, seed {recipe["seed"]}, {record["seconds"] / 60:.1f} minutes on
  {record["hardware"]}, torch {record["torch"]}, transformers {record["transformers"]}.
- **Data**: English prose, dialogue, mathematics, code, instructions and documentation from freely licensed packages:
  `specter_lab/models/zoo/sources.toml` and `NOTICE`. Corpus sha256 `{record["corpus_sha256"][:16]}`.
- **Reproduce**: `make train-zoo` on a machine with a CUDA GPU.

## Held-out loss

| domain | nats per token |
| --- | --- |
{domains}

## Expert load on held-out text

Share of a layer's token-slots divided by the fair share 1/{record["num_experts"]}; lowest {shares.min():.2f}, highest {shares.max():.2f}.

| share of fair load | experts (all layers) | |
| --- | --- | --- |
{bars}

## Loss curve

| M tokens | loss, nats per token | balance (1.0 = even) |
| --- | --- | --- |
{rows}
"""
