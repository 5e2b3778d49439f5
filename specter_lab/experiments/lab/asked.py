"""What `specter-lab measure` is asked: everything that can be refused is looked at before the weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specter_lab.compress.checkpoint import locate
from specter_lab.compress.quantizers import QUANTIZERS
from specter_lab.errors import UserError
from specter_lab.experiments.context import check_seed
from specter_lab.experiments.specter.routing import Question
from specter_lab.measure.capture import check_positions
from specter_lab.measure.prompt_files import gather
from specter_lab.measure.prompts import Request, TokenizedRequests, tokenize
from specter_lab.models.load import check_device, load, placement, read_config, read_tokenizer, resolve

DEPTHS = (2, 4, 8, 12, 16, 24, 32)  # K, as far as the largest that is asked for, which is added
PREFIX_TOKENS = 32  # of each prompt, where the models go on by themselves; fewer when most prompts are shorter
NEW_TOKENS = 64  # that they write then


@dataclass(frozen=True)
class Prompts:
    """Prompts that can be continued side by side, and no two of them alike."""

    tokens: TokenizedRequests
    prefix_tokens: int  # of each, where the models go on by themselves
    left_out: tuple[str, ...]  # what was given and is not measured, each with the reason


@dataclass(frozen=True)
class Asked:
    """A loaded model and what it is to read."""

    question: Question
    prefix_tokens: int
    left_out: tuple[str, ...]


def ask(
    model: str, prompts: Sequence[str], *, requests: int, max_tokens: int | None = None, depth: int = max(DEPTHS),
    seed: int = 0, device: str | None = None,
) -> Asked:  # fmt: skip
    """Read the prompts, see whether the model can continue them, and load it.

    Args:
        model: zoo name, folder or hub id.
        prompts: files, or prompt sets by name.
        requests: how many prompts of each.
        max_tokens: of each prompt; None: all.
        depth: the largest K that is to be drafted.
        seed: of the choice of prompts.
        device: torch device (on others than the CPU the weights are BF16); None: `models.load.placement` decides.

    Raises:
        UserError: device, prompts, model or depth are not there or do not fit each other.
    """
    check_seed(seed)
    check_depth(depth)
    if device is not None:
        check_device(device)
    if max_tokens is not None and max_tokens < 2:
        raise UserError(
            f"prompts cut to {max_tokens} tokens cannot be continued: keep 2 or more, or leave --max-tokens out"
        )
    texts = gather(prompts, requests, seed)
    folder = resolve(model)
    config = read_config(folder)
    given = tokenize(texts, read_tokenizer(folder, config.vocab_size), max_tokens)
    check_positions(config, given, new_tokens=0)
    kept = comparable(given)
    starts = TokenizedRequests(kept.tokens.requests, tuple(ids[: kept.prefix_tokens] for ids in kept.tokens.ids))
    check_positions(config, starts, NEW_TOKENS + depth)
    where = placement(model) if device is None else {"device": device, "dtype": _dtype(device)}
    return Asked(Question(load(model, **where), kept.tokens, seed), kept.prefix_tokens, kept.left_out)


def comparable(tokens: TokenizedRequests) -> Prompts:
    """The prompts that are as long as the common prefix and begin unlike all before them.

    The prefix is PREFIX_TOKENS long, or as long as the lower median of the prompts: a few short ones are left out, and
    do not shorten it for all.

    Raises:
        UserError: fewer than two prompts are left.
    """
    if len(tokens.requests) < 2:
        raise UserError("one prompt has no interval: give at least 2, better 20")
    lengths = sorted(len(ids) for ids in tokens.ids)
    prefix_tokens = min(PREFIX_TOKENS, lengths[(len(lengths) - 1) // 2])
    if prefix_tokens < 2:
        single = next(r.id for r, ids in zip(tokens.requests, tokens.ids) if len(ids) == 1)
        raise UserError(f"prompt '{single}' is a single token, as are most: nothing can be continued from that, so give "
                        f"longer prompts")  # fmt: skip
    first: dict[tuple[int, ...], Request] = {}  # prefix -> who begins with it
    kept, left_out = [], []
    for request, ids in zip(tokens.requests, tokens.ids):
        prefix = tuple(ids[:prefix_tokens].tolist())
        if len(prefix) < prefix_tokens:
            left_out.append(f"{request.id} ({_tokens(len(prefix))}, {prefix_tokens} are needed)")
        elif prefix in first:
            left_out.append(f"{request.id} (begins with the same {prefix_tokens} tokens as {first[prefix].id})")
        else:
            first[prefix] = request
            kept.append(ids)
    if len(kept) < 2:
        raise UserError(f"all prompts of {prefix_tokens} tokens or more begin alike, and their continuations would be one "
                        f"and the same: give prompts that differ within their first {prefix_tokens} tokens")  # fmt: skip
    return Prompts(TokenizedRequests(tuple(first.values()), tuple(kept)), prefix_tokens, tuple(left_out))


def check_depth(depth: int) -> None:
    """Raise UserError when no rounds of this depth are measured."""
    if not 1 <= depth <= max(DEPTHS):
        raise UserError(f"a depth of {depth} is not measured here: give 1 to {max(DEPTHS)}")


def check_quantizer(name: str) -> None:
    """Raise UserError when `name` is neither a quantiser nor a checkpoint that is there."""
    if name in QUANTIZERS:
        return
    if "/" not in name and not Path(name).exists():
        raise UserError(f"no quantiser '{name}': choose one of {', '.join(QUANTIZERS)}, or give the path of a quantised "
                        f"checkpoint")  # fmt: skip
    locate(name)


def _dtype(device: str) -> torch.dtype:
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
