"""What a translator is given in the ZipMoE experiments: whole sentences of one length, and its routing on earlier ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specter_lab.engine.zipmoe.model import generate
from specter_lab.errors import UserError
from specter_lab.files import sha256_of
from specter_lab.models.load import load_translator
from specter_lab.models.stacks import stacks_of
from specter_lab.models.zoo.pairs import PARTS, SHIPPED_DIR, read_pairs
from specter_lab.models.zoo.translation import DIRECTIONS, encode_sources, sides

SOURCE_TOKENS = 24  # tag and end token included; translations are about as long
ASKED, EARLIER = "test", "validation"  # parts of data/translation: what is timed, what the history is of


def files() -> dict[str, str]:
    """The files that sentences come from, name -> sha256."""
    return {f"{part}.jsonl": sha256_of(SHIPPED_DIR / f"{part}.jsonl") for part in PARTS}


def sources(model: str, part: str, count: int, seed: int) -> Tensor:
    """Token ids [count, SOURCE_TOKENS] of sentences in both directions, drawn by the seed; nothing is cut or padded.

    Raises:
        UserError: there are not so many of this length.
    """
    tokenizer, pairs = load_translator(model).tokenizer, read_pairs(part)
    rows = [
        row
        for direction in DIRECTIONS
        for row in encode_sources(tokenizer, [sides(pair, direction)[0] for pair in pairs], direction)
        if len(row) == SOURCE_TOKENS
    ]
    if len(rows) < count:
        raise UserError(f"only {len(rows)} sentences of {SOURCE_TOKENS} tokens were found: ask for fewer than {count}")
    return torch.tensor([rows[i] for i in np.random.default_rng(seed).permutation(len(rows))[:count]])


def routing(model: str, count: int, seed: int) -> list[np.ndarray]:
    """Experts per layer while the zoo model translates earlier sentences: [T, 1] each, sentence by sentence."""
    translator = load_translator(model).model
    stacks, calls = stacks_of(translator.config), {}
    for block, module in stacks.sparse(translator).items():
        used = calls[block] = []
        module.experts.register_forward_hook(lambda _, given, __, used=used: used.append(stacks.indices(given[1])))
    generate(translator, sources(model, EARLIER, count, seed), SOURCE_TOKENS)
    steps = ([call.view(count, -1) for call in used] for used in calls.values())  # an encoder's layer has one call
    return [torch.cat(found, dim=1).view(-1, 1).numpy() for found in steps]
