"""Calibration text as token ids: the same text, model and seed give the same ids."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specter_lab.errors import UserError
from specter_lab.paths import DATA

CALIBRATION = DATA / "calibration" / "calibration.jsonl"  # disjoint from the evaluation text
SEQUENCES = 128
LENGTH = 256  # tokens
SEQUENCES_PER_PASS = 8  # that go through a model at a time


def calibration_ids(
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequences: int = SEQUENCES,
    length: int = LENGTH,
    seed: int = 0,
    path: Path = CALIBRATION,
) -> Tensor:
    """[N, T] int64 ids: the records in an order drawn from `seed`, end to end, cut into equal sequences.

    Args:
        tokenizer: the model's.
        sequences: N.
        length: T, in tokens.
        seed: of the order of the records.
        path: JSON lines with a field `text`.

    Raises:
        UserError: the file is missing, or too short for N x T tokens.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            texts = [json.loads(line)["text"] for line in lines]
    except FileNotFoundError as error:
        raise UserError(f"no calibration text at {path}: restore it with `git checkout -- data`") from error
    random.Random(seed).shuffle(texts)
    wanted, ids = sequences * length, []
    for text in texts:
        ids += tokenizer(text, verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        if len(ids) >= wanted:
            return torch.tensor(ids[:wanted]).view(sequences, length)
    raise UserError(f"{path} has {len(ids):,} tokens, {sequences} sequences of {length} need {wanted:,}: ask for fewer")


def digest_of(ids: Tensor) -> str:
    """sha256 over shape and values, hexadecimal."""
    content = str(tuple(ids.shape)).encode() + ids.to(torch.int64).cpu().contiguous().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()
