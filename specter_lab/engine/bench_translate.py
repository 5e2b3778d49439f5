"""Speed of whole translations in the paper's geometry, random weights: naive loop, grouped, int8, int4.

    python -m specter_lab.engine.bench_translate [--batches 1 8 ...] [--beams 1 2] [--json FILE]

Sentences have SOURCE_TOKENS tokens and become as many. The naive system computes expert after expert as the class in
transformers does, and asks the host which tokens each has; the others capture encoder and decoder step as CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specter_lab.engine.kernels.channel_gemm import HALF, INT4_I2F, INT8_I2F
from specter_lab.engine.switch_experts import Experts, LoopExperts, channel_experts
from specter_lab.engine.switch_model import SwitchModel, random_switch
from specter_lab.engine.translate import Options, Session
from specter_lab.models.switch import ELEPHANTS, SwitchGeometry

NAIVE, GROUPED, INT8, INT4 = SYSTEMS = ("naive loop", "grouped, 16 bit", "grouped, int8", "grouped, int4")
MAKE: dict[str, Callable[[Tensor, Tensor], Experts]] = {
    NAIVE: LoopExperts, GROUPED: partial(channel_experts, kind=HALF), INT8: partial(channel_experts, kind=INT8_I2F),
    INT4: partial(channel_experts, kind=INT4_I2F),
}  # fmt: skip
BATCHES, BEAMS = (1, 8, 20, 32, 64, 96), (1, 2)
SOURCE_TOKENS = 32
REPEATS = {NAIVE: 3, GROUPED: 7, INT8: 7, INT4: 7}


@dataclass(frozen=True)
class SpeedRow:
    """One timed batch."""

    system: str
    batch: int
    beam: int
    input_tokens: int
    output_tokens: int
    steps: int
    seconds: float  # median of the repeats
    seconds_low: float  # fastest
    seconds_high: float
    repeats: int

    @property
    def input_tokens_s(self) -> float:
        return self.input_tokens / self.seconds


def random_model(
    system: str, geometry: SwitchGeometry = ELEPHANTS, *, dtype: torch.dtype = torch.float16, device: str = "cuda"
) -> SwitchModel:
    """The paper's geometry with random weights, experts as `system` has them."""
    return random_switch(geometry, MAKE[system], dtype=dtype, device=device)


def timed(session: Session, sources: Tensor, lengths: Tensor | None, repeats: int) -> tuple[list[float], int]:
    """Seconds of each repeat, after one to warm up, and the decoder steps."""
    steps = session(sources, lengths).steps
    found = []
    for _ in range(repeats):
        _wait(session.model)
        began = time.perf_counter()
        session(sources, lengths)
        _wait(session.model)
        found.append(time.perf_counter() - began)
    return found, steps


def _wait(model: SwitchModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def speed_rows(
    system: str, model: SwitchModel, *, batches: Iterable[int] = BATCHES, beams: Iterable[int] = BEAMS
) -> Iterator[SpeedRow]:
    """One system on every batch size and beam."""
    vocab = len(model.embedding)
    for beam in beams:
        for batch in batches:
            options = Options(beam=beam, max_tokens=SOURCE_TOKENS, graph=system != NAIVE)
            session = Session(model, batch, SOURCE_TOKENS, options, forced=True)
            sources = torch.randint(3, vocab, (batch, SOURCE_TOKENS), device=model.device)
            seconds, steps = timed(session, sources, None, REPEATS[system])
            yield SpeedRow(system, batch, beam, batch * SOURCE_TOKENS, batch * steps, steps, statistics.median(seconds),
                           min(seconds), max(seconds), len(seconds))  # fmt: skip


@dataclass(frozen=True)
class PruningRow:
    """One batch with and without pruning."""

    system: str
    batch: int
    spread: float  # lengths are uniform in mean x (1 - spread) .. mean x (1 + spread)
    length_cv: float  # standard deviation over mean
    seconds: float
    seconds_pruned: float
    experts: float  # distinct ones per step and layer
    experts_pruned: float
    equal: bool  # the same translations


def distinct(experts: Tensor, num_experts: int) -> Tensor:
    """Experts in use [steps, L], of ids [steps, L, R]; the id past the last is none."""
    used = torch.zeros(*experts.shape[:2], num_experts + 1, dtype=torch.bool, device=experts.device)
    return used.scatter_(2, experts, True)[..., :num_experts].sum(-1)


def pruning_rows(system: str, model: SwitchModel, *, batches: Iterable[int], spreads: Iterable[float], repeats: int = 5,
                 mean_tokens: int = 32, seed: int = 0) -> Iterator[PruningRow]:  # fmt: skip
    """What pruning saves when sentences end at different times; encoder included."""
    draw = torch.Generator().manual_seed(seed)
    for batch in batches:
        sessions = [
            Session(
                model,
                batch,
                SOURCE_TOKENS,
                Options(max_tokens=2 * mean_tokens, prune=prune, graph=system != NAIVE),
                forced=True,
            )
            for prune in (False, True)
        ]
        sources = torch.randint(3, len(model.embedding), (batch, SOURCE_TOKENS), generator=draw).to(model.device)
        for spread in spreads:
            uniform = torch.rand(batch, generator=draw) * 2 - 1
            lengths = (mean_tokens * (1 + spread * uniform)).round().clamp_min(1).long()
            lengths[0] = round(mean_tokens * (1 + spread))  # every batch of a spread runs equally long
            plain, pruned = (timed(session, sources, lengths.to(model.device), repeats)[0] for session in sessions)
            with_all, without = (session(sources, lengths.to(model.device)) for session in sessions)
            counts = [
                float(distinct(found.experts, model.num_experts).double().mean()) for found in (with_all, without)
            ]
            yield PruningRow(system, batch, spread, float(lengths.double().std() / lengths.double().mean()), statistics.median(plain),
                             statistics.median(pruned), *counts, torch.equal(with_all.tokens, without.tokens))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--beams", nargs="*", type=int, default=BEAMS)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    rows = []
    for system in arguments.systems:
        model = random_model(system)
        for row in speed_rows(system, model, batches=arguments.batches, beams=arguments.beams):
            print(f"{row.system:<16} beam {row.beam} batch {row.batch:>3}: {row.input_tokens_s:>9.0f} input tokens/s, "
                  f"{row.seconds * 1e3:.1f} ms [{row.seconds_low * 1e3:.1f}, {row.seconds_high * 1e3:.1f}], {row.steps} steps", flush=True)  # fmt: skip
            rows.append(asdict(row))
        del model
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
