"""How fast the engine decodes, beside what limits it.

    python -m specter_lab.engine.bench --model qwen-nano --widen-to Qwen1.5-MoE-A2.7B --slots 60 30 15 8
    python -m specter_lab.engine.bench --random Qwen1.5-MoE-A2.7B --slots 60 15

The first lines time the passes alone, with every expert resident, beside their floor: bytes read over the bandwidth of a copy.
Then, for every number of slots per layer and every depth: milliseconds per token (median of repeats, steady: first round left
out of none), acceptance, tokens per round, hit rate, bytes per token over the link, and the share of its bandwidth that this is.
With random weights acceptance and hits mean nothing, so only the link's figures are shown.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from itertools import product
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from specter_lab.engine.api import Engine, engine_for
from specter_lab.engine.decode import Meter
from specter_lab.engine.weights import Weights, load_weights

PROMPT = "The old man walked along the river, and when he came to the bridge he said to his son that"
RANDOM_PROMPT_TOKENS = 24
DEPTHS = (0, 3, 8, 16, None)
VERIFIED = (1, 9, 17)
PASS_POSITION = 64  # tokens before those of a timed pass
RUNS = 8  # of a pass between two events: as in a round, no launch waits for the host


@dataclass(frozen=True)
class Pass:
    """A pass with every expert resident; times are medians."""

    what: str
    ms: float
    read_bytes: int  # every weight and cache entry it needs, once
    floor_ms: float

    @property
    def ratio(self) -> float:
        return self.ms / self.floor_ms


@dataclass(frozen=True)
class Row:
    """One setting."""

    slots_per_layer: int
    depth: str
    ms_per_token: float
    acceptance: float
    tokens_per_round: float
    hit_rate: float  # distinct experts in a slot when verification began
    link_bytes_per_token: float
    link_gb_s: float  # moved over decoding time
    busy_ms_per_token: dict[str, float]  # by kind of work, see `decode.Meter`


def decode_row(engine: Engine, depth: int | None, tokens: int, repeats: int, ids: Tensor) -> Row:
    """Decode `tokens` tokens after `ids` [P] `repeats` times after one warm-up."""
    engine.generate(ids, tokens, depth=depth, ignore_eos=True)
    runs = []
    for _ in range(repeats):
        engine.stats = Meter()
        engine.generate(ids, tokens, depth=depth, ignore_eos=True)
        runs.append(engine.stats)
    meter = sorted(runs, key=lambda run: run.seconds / run.tokens)[len(runs) // 2]
    moved = meter.h2d_bytes + meter.read_through_bytes
    return Row(
        slots_per_layer=int(engine.memory.slots.count.min()), depth="online" if depth is None else str(depth),
        ms_per_token=1e3 * meter.seconds / meter.tokens, acceptance=meter.acceptance,
        tokens_per_round=meter.tokens_per_round, hit_rate=meter.hits / meter.needed,
        link_bytes_per_token=moved / meter.tokens, link_gb_s=moved / meter.seconds / 1e9,
        busy_ms_per_token={work: ms / meter.tokens for work, ms in meter.busy_ms.items()},
    )  # fmt: skip


def passes(engine: Engine, copy_gb_s: float, verified: Sequence[int] = VERIFIED, repeats: int = 15) -> list[Pass]:
    """One draft step and verifications of so many tokens, each beside its floor."""
    session = engine.session_for(256, 16, 0.0)
    found = []
    with torch.inference_mode():
        for tokens in (0, *verified):
            session.window.random_(0, engine.memory.shape.vocab)
            run = session.draft_step if tokens == 0 else (lambda: session.verify(tokens - 1))
            ms = median(_timed_ms(session, run) for _ in range(repeats))
            if tokens == 0:
                read_bytes = _draft_bytes(engine)
            else:
                read_bytes = _verify_bytes(engine, _used(session, tokens))
            what = f"verify {tokens}" if tokens else "draft step"
            found.append(Pass(what, ms, read_bytes, read_bytes / copy_gb_s / 1e6))
    return found


def _timed_ms(session, run) -> float:
    """Of one run among `RUNS`, by device events on a GPU."""
    on_gpu = session.window.is_cuda
    session.position.fill_(PASS_POSITION)
    session.step.zero_()
    if not on_gpu:
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    session.step.zero_()
    before.record()
    for _ in range(RUNS):
        run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / RUNS


def _used(session, tokens: int) -> Tensor:
    """Experts [L, T, k] of a verification of `tokens` tokens."""
    used = session.verify(tokens - 1).used
    torch.cuda.synchronize()
    return used


def _draft_bytes(engine: Engine) -> int:
    shape = engine.memory.shape
    return _dense_bytes(engine) + engine.draft.nbytes * shape.top_k // shape.num_experts


def _verify_bytes(engine: Engine, used: Tensor) -> int:
    """used: experts [L, T, k] of the pass."""
    experts = sum(layer.unique().numel() for layer in used)
    return _dense_bytes(engine) + experts * engine.memory.host[0, 0].nbytes


def _dense_bytes(engine: Engine) -> int:
    """Everything but routed experts: all weights once, but of the embedding only a row, and the context's cache entries."""
    decoder, session = engine.weights.decoder, engine._session
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in tensors_of((decoder.layers, decoder.norm, decoder.head))}
    cached = sum(part[:, :PASS_POSITION].nbytes for part in (*session.kv.keys, *session.kv.values))
    return sum(weights.values()) + cached


def tensors_of(of: object) -> Iterator[Tensor]:
    if isinstance(of, Tensor):
        yield of
    elif isinstance(of, list | tuple):
        for part in of:
            yield from tensors_of(part)
    elif is_dataclass(of):
        for part in fields(of):
            yield from tensors_of(getattr(of, part.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen-nano")
    parser.add_argument("--widen-to", default=None)
    parser.add_argument("--random", default=None, metavar="ORIGINAL", help="random weights of this geometry instead")
    parser.add_argument("--systems", nargs="+", default=["fast"], help="modes, or mode:policy like paper:lru")
    parser.add_argument("--draft", default="int4", help="as of specter-lab generate, e.g. gptq-int4")
    parser.add_argument("--slots", type=int, nargs="+", default=[60, 15])
    parser.add_argument("--depths", type=int, nargs="*", default=None, help="instead of 0 3 8 16 and online")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows, timed = [], []
    weights = _loaded(options)
    for slots, system in product(options.slots, options.systems):
        mode, _, policy = system.partition(":")
        engine = engine_for(
            weights, expert_budget=slots, in_slots=True, mode=mode, policy=policy or None, draft=options.draft
        )
        print(
            f"{engine.policy.title}, draft {engine.draft.name}, {slots} slots per layer: {engine.budget.taken}",
            flush=True,
        )
        if slots >= weights.shape.num_experts and mode == "fast":
            engine.fill_slots()
            timed = _show_passes(engine)
        for depth in DEPTHS if options.depths is None else options.depths:
            if depth and not engine.draft.banks:
                continue
            row = decode_row(engine, depth, options.tokens, options.repeats, _prompt(engine))
            rows.append(row)
            _show_row(row, meaningful=options.random is None)
        del engine
    if options.json:
        numbers = {"passes": [asdict(found) for found in timed], "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps({"random": options.random, **numbers}, indent=1))


def _loaded(options: argparse.Namespace) -> Weights:
    began = time.perf_counter()
    if options.random:
        from specter_lab.engine.random_model import random_weights

        weights = random_weights(options.random)
    else:
        weights = load_weights(options.model, widen_to=options.widen_to)
    print(
        f"{weights.name}: {weights.host.nbytes / 1e9:.1f} GB of experts in {time.perf_counter() - began:.1f} s",
        flush=True,
    )
    return weights


def _prompt(engine: Engine) -> Tensor:
    if engine.tokenizer is None:
        return torch.arange(RANDOM_PROMPT_TOKENS)
    return torch.tensor(engine.tokenizer(PROMPT)["input_ids"])


def _show_passes(engine: Engine) -> list[Pass]:
    if engine.device.type != "cuda":
        return []
    from specter_lab.engine.kernels.timing import copy_gb_s

    bandwidth = copy_gb_s()
    found = passes(engine, bandwidth)
    print(f"  all experts resident, position {PASS_POSITION}, copy {bandwidth:.0f} GB/s")
    for each in found:
        print(f"  {each.what:<10} {each.ms:7.3f} ms  {each.read_bytes / 1e9:6.3f} GB  floor {each.floor_ms:6.3f} ms  "
              f"ratio {each.ratio:.2f}", flush=True)  # fmt: skip
    return found


def _show_row(row: Row, meaningful: bool) -> None:
    found = (f"acceptance {row.acceptance:.3f}  tokens/round {row.tokens_per_round:5.2f}  hits {row.hit_rate:.3f}  "
             if meaningful else "")  # fmt: skip
    print(f"  slots {row.slots_per_layer:3d} K {row.depth:>6s} {row.ms_per_token:8.3f} ms/token  {found}"
          f"{row.link_bytes_per_token / 1e6:8.1f} MB/token  link {row.link_gb_s:5.1f} GB/s  "
          + "  ".join(f"{work} {ms:.2f}" for work, ms in row.busy_ms_per_token.items()), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
