"""Which experts the calibration text reaches, layer by layer, and what happened to those it does not."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from tqdm.auto import tqdm

from specter_lab.compress.calibration import SEQUENCES_PER_PASS
from specter_lab.models.load import LoadedModel
from specter_lab.models.routing import Routing, observe_routing


@dataclass(frozen=True)
class Coverage:
    """Calibration tokens that each routed expert received."""

    calibration_tokens: int  # N x T; every one goes to top-k experts per layer
    layers: tuple[int, ...]  # decoder layers with experts
    tokens_per_expert: tuple[tuple[int, ...], ...]  # one row per layer, one number per expert
    fallback: str  # what a starved expert got instead

    @property
    def starved(self) -> tuple[tuple[int, int], ...]:
        """(layer, expert) pairs that not one calibration token reached."""
        return tuple(
            (layer, expert)
            for layer, row in zip(self.layers, self.tokens_per_expert)
            for expert, tokens in enumerate(row)
            if tokens == 0
        )

    def to_json(self) -> dict:
        """Plain data for report.json; lists the starved experts too, for the reader."""
        return asdict(self) | {"starved": self.starved}

    @staticmethod
    def from_json(data: dict) -> Coverage:
        """The inverse of `to_json`."""
        rows = tuple(map(tuple, data["tokens_per_expert"]))
        return Coverage(data["calibration_tokens"], tuple(data["layers"]), rows, data["fallback"])


def of_counts(counts: dict[int, Tensor], calibration_tokens: int, *, fallback: str) -> Coverage:
    """Coverage from tokens per expert; `counts` maps a layer to a tensor [E]."""
    layers = tuple(sorted(counts))
    rows = tuple(tuple(counts[layer].tolist()) for layer in layers)
    return Coverage(calibration_tokens, layers, rows, fallback)


@torch.no_grad()
def measure(source: LoadedModel, ids: Tensor, *, fallback: str) -> Coverage:
    """Count, in the full-precision model, the tokens of `ids` [N, T] that reach each expert."""
    counts: dict[int, Tensor] = {}

    def count(routing: Routing) -> None:
        tokens = torch.bincount(routing.indices.flatten(), minlength=source.num_experts)
        counts[routing.layer] = counts.get(routing.layer, 0) + tokens

    with observe_routing(source.model, count):
        batches = ids.to(source.model.device).split(SEQUENCES_PER_PASS)
        for batch in tqdm(batches, f"calibration coverage of {source.name}", unit="batch", delay=2.0):
            source.model(batch, use_cache=False, logits_to_keep=1)
    return of_counts(counts, ids.numel(), fallback=fallback)
