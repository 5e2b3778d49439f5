"""The model card of a translation model, written from its training record."""

from __future__ import annotations


def render(record: dict) -> str:
    """Markdown with YAML front matter; every number comes from `record` (training.json)."""
    loads = [share for layer in record["expert_load_share"] for share in layer]
    recipe = record["recipe"]
    rows = "\n".join(
        f"| {point['step']} | {point['loss']:.3f} | {point['validation']:.3f} | {point['balance']:.3f} |"
        for point in record["loss_curve"]
    )
    exact = ", ".join(f"{direction} {found['exact_match']:.1%}" for direction, found in record["samples"].items())
    return f"""---
license: apache-2.0
language: [en, de]
library_name: transformers
pipeline_tag: translation
tags: [mixture-of-experts, research]
---
# {record["name"]}

A {record["parameters"] / 1e6:.1f} M parameter English-German translation model of class SwitchTransformersForConditionalGeneration:
{record["num_experts"]} experts, top-1, every other layer sparse, no dropped tokens. It was trained from scratch on **software interface
text** for measuring quantisation, routing and batch pruning; it translates nothing else, and nothing measured on it may
carry another model's name. The source starts with its direction's tag: `<to-de>` or `<to-en>`.

- **Weights**: BF16 safetensors, trained with float32 parameters under BF16 autocast and rounded at the end.
- **Training**: {record["steps"]} steps of up to {recipe["batch_tokens"]} padded tokens a side over {record["examples"]:,} examples ({record["pairs"]:,} pairs, both
  directions), AdamW, peak learning rate {recipe["lr"]:g} with cosine decay, label smoothing {recipe["label_smoothing"]:g}, load-balancing loss
  {recipe["balance"]:g} per layer, seed {recipe["seed"]}, {record["seconds"] / 60:.1f} minutes on {record["hardware"]}, torch {record["torch"]}, transformers
  {record["transformers"]}. The weights with the lowest validation loss are kept.
- **Data**: sources with domain "translation" in `specter_lab/models/zoo/sources.toml`, see `NOTICE`. Training pairs sha256
  `{record["pairs_sha256"][:16]}`. No string of the validation and test pairs, in either language, is a training string.
- **Validation**: {record["validation_nats_per_token"]:.3f} nats per target token. Greedy translations equal to the reference (first test
  pairs): {exact}. BLEU and chrF: experiment `elephants-table2`.
- **Expert load** on validation text: {min(loads):.2f} to {max(loads):.2f} of the fair share.
- **Reproduce**: `python -m specter_lab.models.zoo.pairs`, then `python -m specter_lab.models.zoo.train_translation` with a CUDA GPU.

## Loss curve

| step | loss (label-smoothed), nats per token | validation, nats per token | balance (1.0 = even) |
| --- | --- | --- | --- |
{rows}
"""
