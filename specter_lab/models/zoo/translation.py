"""What a translation model of the zoo reads and is: tokenizer, encoded pairs, batches, shapes.

A source is its direction's tag, its pieces and </s>; a target is its pieces and </s>. One model serves both directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, SwitchTransformersConfig

from specter_lab.models.zoo.pairs import Pair
from specter_lab.models.zoo.tokenizer import SPECIAL_TOKENS, train_tokenizer

DIRECTIONS = ("en-de", "de-en")
TAGS = {"en-de": "<to-de>", "de-en": "<to-en>"}
VOCAB_SIZE = 2048
PAD, END = 0, 2
IGNORED = -100  # label of padding
WIDTH_STEP = 8  # batches are padded to a multiple of this


def config(*, d_model: int, d_ff: int, heads: int, head_dim: int, encoder_layers: int, decoder_layers: int,
           dropout: float, experts: int = 32) -> SwitchTransformersConfig:  # fmt: skip
    """The paper's routing geometry (32 experts, top-1, every other layer sparse, no dropped token) at another width."""
    return SwitchTransformersConfig(
        vocab_size=VOCAB_SIZE, d_model=d_model, d_ff=d_ff, d_kv=head_dim, num_heads=heads,
        num_layers=encoder_layers, num_sparse_encoder_layers=encoder_layers // 2,
        num_decoder_layers=decoder_layers, num_sparse_decoder_layers=decoder_layers // 2,
        num_experts=experts, expert_capacity=1_000_000, router_jitter_noise=0.0, dropout_rate=dropout,
        tie_word_embeddings=True, pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=PAD,
    )  # fmt: skip


# Twice as many encoder as decoder layers, as in the paper (24 and 12).
NANO = config(d_model=128, d_ff=128, heads=4, head_dim=32, encoder_layers=4, decoder_layers=2, dropout=0.1)
LARGE = config(d_model=512, d_ff=1024, heads=8, head_dim=64, encoder_layers=8, decoder_layers=4, dropout=0.2)
SHAPES = {"switch-nano": NANO, "switch-large": LARGE}


def pair_tokenizer(pairs: list[Pair]) -> PreTrainedTokenizerFast:
    """One byte-level BPE for both languages, with the direction tags as special tokens."""
    texts = (side for pair in pairs for side in (pair.en, pair.de))
    return train_tokenizer(texts, VOCAB_SIZE, (*SPECIAL_TOKENS, *TAGS.values()))


def sides(pair: Pair, direction: str) -> tuple[str, str]:
    """Source and target text of a pair."""
    return (pair.en, pair.de) if direction == "en-de" else (pair.de, pair.en)


def encode_sources(tokenizer: PreTrainedTokenizerFast, texts: list[str], direction: str) -> list[list[int]]:
    """Token ids of source sentences: tag, pieces, </s>."""
    tag = tokenizer.convert_tokens_to_ids(TAGS[direction])
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [[tag, *one.ids, END] for one in encoded]


def padded(rows: list[list[int]], width: int | None = None, value: int = PAD) -> Tensor:
    """Token ids [B, width], filled up on the right."""
    table = torch.full((len(rows), width or max(map(len, rows))), value)
    for index, row in enumerate(rows):
        table[index, : len(row)] = torch.tensor(row)
    return table


@dataclass(frozen=True)
class Examples:
    """Encoded pairs of both directions on one device, in groups of equal padded width."""

    sources: Tensor  # [N, W] token ids, padded
    targets: Tensor  # [N, W] token ids, IGNORED where padded
    widths: Tensor  # [N] longer side of each, rounded up to WIDTH_STEP; on the CPU

    @staticmethod
    def of(pairs: list[Pair], tokenizer: PreTrainedTokenizerFast, max_tokens: int, device: str) -> Examples:
        """Encode both directions; pairs with more than `max_tokens` on a side are left out."""
        rows = []
        for direction in DIRECTIONS:
            sources = encode_sources(tokenizer, [sides(pair, direction)[0] for pair in pairs], direction)
            targets = tokenizer.backend_tokenizer.encode_batch_fast([sides(pair, direction)[1] for pair in pairs])
            rows += zip(sources, [[*one.ids, END] for one in targets])
        rows = [row for row in rows if max(map(len, row)) <= max_tokens]
        longest = torch.tensor([max(map(len, row)) for row in rows])
        return Examples(
            padded([source for source, _ in rows], max_tokens).to(device),
            padded([target for _, target in rows], max_tokens, IGNORED).to(device),
            (longest + WIDTH_STEP - 1) // WIDTH_STEP * WIDTH_STEP,
        )

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sources and targets [B, w] of some rows of equal width."""
        width = int(self.widths[rows].max())
        rows = rows.to(self.sources.device)
        return self.sources[rows, :width], self.targets[rows, :width]


def epoch(examples: Examples, batch_tokens: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Row indices of every example once: batches of one width, at most `batch_tokens` padded tokens a side, shuffled."""
    batches: list[Tensor] = []
    for width in examples.widths.unique().tolist():
        rows = (examples.widths == width).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        batches += rows.split(max(1, batch_tokens // width))
    for index in torch.randperm(len(batches), generator=generator).tolist():
        yield batches[index]
