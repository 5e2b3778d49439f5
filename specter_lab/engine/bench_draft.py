"""What a draft's codes are worth: acceptance, tokens per round, and what residual transport moves beside them.

    python -m specter_lab.engine.bench_draft --models qwen-nano phi-nano --drafts int4 gptq-int4 [--json FILE]
    python -m specter_lab.engine.bench_draft --models qwen-nano --widen-to Qwen1.5-MoE-A2.7B       # on a GPU

Greedy, over prompts of every set; the text must be the same with every draft and with none, and is compared. Acceptance is
accepted over drafted tokens of rounds of `--depth`, with a 95 % interval over prompts (bootstrap); `gain` is what it is above the
first draft's, over the same prompts and the same resamples of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from specter_lab.engine.api import Engine, engine_for
from specter_lab.engine.decode import Meter
from specter_lab.engine.draft import NONE, ROUNDED
from specter_lab.engine.weights import Weights, load_weights
from specter_lab.measure.bootstrap import ratio_interval, resample_counts
from specter_lab.measure.prompts import select, tokenize

RESAMPLES = 2000


@dataclass(frozen=True)
class DraftRow:
    """One draft of one model."""

    model: str
    draft: str
    prompts: int
    depth: int
    acceptance: float  # accepted over drafted tokens
    acceptance_low: float
    acceptance_high: float
    gain: float  # of acceptance over the first draft's
    gain_low: float
    gain_high: float
    tokens_per_round: float
    residual_bits: float  # of 16, per weight over the link
    exceptions: float  # share of weights listed as they are
    same_text: bool  # as plain decoding, for every prompt


def rows(
    weights: Weights, drafts: list[str], prompts: list[Tensor], *, depth: int, new_tokens: int, slots: int
) -> Iterator[DraftRow]:
    """Every draft on the same prompts [P] each."""
    how = {"expert_budget": slots, "in_slots": True, "mode": "fast"}
    plain = _texts(engine_for(weights, draft=NONE, **how), prompts, 0, new_tokens)[0]
    first: tuple[np.ndarray, np.ndarray] | None = None
    for draft in drafts:
        texts, meters = _texts(engine_for(weights, draft=draft, **how), prompts, depth, new_tokens)
        accepted, drafted, tokens, rounds = (
            np.array([getattr(meter, name) for meter in meters]) for name in ("accepted", "drafted", "tokens", "rounds")
        )
        first = first or (accepted, drafted)
        found, records = ratio_interval(accepted, drafted), weights.records(draft)
        yield DraftRow(
            weights.name, draft, len(prompts), depth, float(found.estimate), float(found.low), float(found.high),
            *_gain((accepted, drafted), first), float(tokens.sum() / rounds.sum()), records.bits,
            float(records.exceptions.sum() / (records.exceptions.size * records.numel)),
            all(map(torch.equal, texts, plain)),
        )  # fmt: skip


def _gain(mine: tuple[np.ndarray, np.ndarray], first: tuple[np.ndarray, np.ndarray]) -> tuple[float, float, float]:
    """Difference of two ratios of sums over prompts [P], and its 95 % interval."""
    drawn = np.concatenate([np.ones((1, len(mine[0]))), resample_counts(len(mine[0]), RESAMPLES, seed=0)])  # [1 + B, P]
    found = drawn @ mine[0] / (drawn @ mine[1]) - drawn @ first[0] / (drawn @ first[1])
    return float(found[0]), *np.quantile(found[1:], (0.025, 0.975)).tolist()


def _texts(engine: Engine, prompts: list[Tensor], depth: int, new_tokens: int) -> tuple[list[Tensor], list[Meter]]:
    texts, meters = [], []
    for ids in tqdm(prompts, f"draft {engine.draft.name}, depth {depth}", unit="prompt", delay=2.0):
        engine.stats = Meter()
        texts.append(engine.generate(ids, new_tokens, depth=depth, ignore_eos=True))
        meters.append(engine.stats)
    return texts, meters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen-nano", "phi-nano", "deepseek-nano"])
    parser.add_argument("--widen-to", default=None)
    parser.add_argument("--drafts", nargs="+", default=[ROUNDED, "gptq-int4"], help="names or checkpoints")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4, help="of every set (default: 4)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="of each (default: 32)")
    parser.add_argument("--tokens", type=int, default=96, help="new ones (default: 96)")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    found = []
    for model in options.models:
        weights = load_weights(model, widen_to=options.widen_to)
        tokens = tokenize(select(options.prompts), weights.tokenizer, options.prompt_tokens)
        for row in rows(weights, options.drafts, list(tokens.ids), depth=options.depth, new_tokens=options.tokens,
                        slots=options.slots):  # fmt: skip
            found.append(row)
            print(f"{row.model:<14} {row.draft:<22} acceptance {row.acceptance:.3f} [{row.acceptance_low:.3f}, {row.acceptance_high:.3f}], "
                  f"gain {row.gain:+.3f} [{row.gain_low:+.3f}, {row.gain_high:+.3f}], n = {row.prompts} prompts  tokens/round {row.tokens_per_round:.2f}  residual {row.residual_bits:.2f} of 16 bits, "
                  f"{row.exceptions:.2%} exceptions  {'same text' if row.same_text else 'OTHER TEXT'}", flush=True)  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1))


if __name__ == "__main__":
    main()
