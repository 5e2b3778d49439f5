"""Sentences in, sentences out: tokenised with their direction's tag, batched by length, put back in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specter_lab.engine.switch_model import SwitchModel
from specter_lab.engine.translate import Options, Translation, translate
from specter_lab.models.zoo.translation import encode_sources, padded


@dataclass(frozen=True)
class Batch:
    """Some of the sentences, and what became of them."""

    sentences: list[int]  # their numbers
    sources: Tensor  # [B, S] token ids
    result: Translation


def translate_batches(model: SwitchModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], direction: str,
                      options: Options, batch: int, *, by_length: bool = True) -> list[Batch]:  # fmt: skip
    """Translate in batches of `batch` sentences, of like length or as they come."""
    rows = encode_sources(tokenizer, list(texts), direction)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i])) if by_length else list(range(len(rows)))
    found = []
    for first in range(0, len(order), batch):
        chosen = order[first : first + batch]
        sources = padded([rows[i] for i in chosen]).to(model.device)
        found.append(Batch(chosen, sources, translate(model, sources, options)))
    return found


def texts_of(batches: Sequence[Batch], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The translations, in the order of the sentences."""
    by_number: dict[int, str] = {}
    for batch in batches:
        decoded = tokenizer.batch_decode(batch.result.tokens, skip_special_tokens=True)
        by_number.update(zip(batch.sentences, (text.strip() for text in decoded)))
    return [by_number[number] for number in range(len(by_number))]


def translate_texts(model: SwitchModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], direction: str,
                    options: Options, batch: int = 100) -> list[str]:  # fmt: skip
    """The translation of every sentence; `direction` is "en-de" or "de-en"."""
    with torch.inference_mode():
        return texts_of(translate_batches(model, tokenizer, texts, direction, options, batch), tokenizer)
