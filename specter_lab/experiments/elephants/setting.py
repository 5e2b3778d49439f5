"""What the Elephants experiments share: which translator, which sentences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from specter_lab.experiments.context import Context
from specter_lab.experiments.registry import DEFAULT_MODELS
from specter_lab.files import sha256_of
from specter_lab.models.load import TRANSLATORS, checkpoint_digest, resolve
from specter_lab.models.zoo.pairs import SHIPPED_DIR, read_pairs
from specter_lab.models.zoo.text import order_key
from specter_lab.models.zoo.translation import sides

DOMAIN = "software interface text"  # stands wherever a BLEU stands
MAX_TOKENS = 96  # of a translation, as in training


def translators(context: Context) -> tuple[str, ...]:
    """The models that the user named, else the zoo's translator."""
    return TRANSLATORS if context.models == DEFAULT_MODELS[context.tier] else context.models


@cache
def digest_of(model: str) -> str:
    """sha256 over the checkpoint of a translator."""
    return checkpoint_digest(resolve(model))


def inputs(context: Context) -> dict[str, str]:
    """Translators and test sentences, name -> sha256."""
    return {name: digest_of(name) for name in translators(context)} | {
        "test.jsonl": sha256_of(SHIPPED_DIR / "test.jsonl")
    }


def sentences(direction: str, count: int, seed: int) -> tuple[Sequence[str], Sequence[str]]:
    """`count` test sentences, drawn by the seed, and their references."""
    drawn = sorted(read_pairs("test"), key=lambda pair: order_key(seed, pair.en))[:count]
    found = [sides(pair, direction) for pair in drawn]
    return [source for source, _ in found], [reference for _, reference in found]
