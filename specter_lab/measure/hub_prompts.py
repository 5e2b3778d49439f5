"""The papers' own prompt sets, for the `paper` tier: fetched from a dataset hub, never shipped."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from specter_lab.errors import UserError
from specter_lab.measure.prompts import Request


@dataclass(frozen=True)
class HubSet:
    """Where a data set lies on the hub, and which of its columns is the prompt."""

    path: str
    config: str | None
    split: str
    text: str  # column
    reference: str | None  # column
    licence: str


HUB_SETS = {
    "gsm8k": HubSet("openai/gsm8k", "main", "test", "question", "answer", "MIT"),
    "wikitext2": HubSet("Salesforce/wikitext", "wikitext-2-raw-v1", "test", "text", None, "CC-BY-SA-3.0"),
    "humaneval": HubSet("openai/openai_humaneval", None, "test", "prompt", "canonical_solution", "MIT"),
    "gpqa": HubSet("Idavidrein/gpqa", "gpqa_diamond", "train", "Question", "Correct Answer", "CC-BY-4.0"),
    "c4": HubSet("allenai/c4", "en", "validation", "text", None, "ODC-BY"),
}  # the data sets of Specter's evaluation


def fetch_prompts(name: str, count: int) -> list[Request]:
    """The first `count` prompts of a hub data set, streamed; empty rows and headings (" = Title = ") are skipped.

    Raises:
        UserError: unknown name, the `datasets` package is missing, no hub can be reached, or too few rows.
    """
    if name not in HUB_SETS:
        raise UserError(f"no hub data set '{name}': choose from {', '.join(HUB_SETS)}")
    hub_set = HUB_SETS[name]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError("the package 'datasets' is missing: run `make setup`") from error
    try:
        rows = load_dataset(hub_set.path, hub_set.config, split=hub_set.split, streaming=True)
        texts = (row for row in rows if (text := row[hub_set.text].strip()) and not text.startswith("= "))
        kept = list(itertools.islice(texts, count))
    except Exception as error:  # hub, network, gate and file errors are a dozen unrelated types
        raise UserError(
            f"cannot fetch '{hub_set.path}' ({type(error).__name__}): it needs a model hub (and, for gated data, a "
            f"login); without one use the prompt sets that ship with the project"
        ) from error
    if len(kept) < count:
        raise UserError(f"'{hub_set.path}' has {len(kept)} prompts: ask for at most that many, not {count}")
    return [
        Request(f"{name}-{i:04d}", name, hub_set.path, hub_set.licence, row[hub_set.text],
                row[hub_set.reference] if hub_set.reference else None)
        for i, row in enumerate(kept)
    ]  # fmt: skip
