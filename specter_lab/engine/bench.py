"""How fast the engine decodes, beside what limits it.

    python -m specter_lab.engine.bench --model qwen-nano --widen-to Qwen1.5-MoE-A2.7B --slots 60 30 15 8

For every number of slots per layer and every depth: milliseconds per token (median of repeats, steady: first round left out of
none), acceptance, tokens per round, hit rate, bytes per token over the link, and the share of the link's bandwidth that this is.
The first lines time the two passes alone, with every expert resident.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from specter_lab.engine.api import Engine, load
from specter_lab.engine.decode import Meter

PROMPT = "The old man walked along the river, and when he came to the bridge he said to his son that"
DEPTHS = (0, 3, 8, 16, None)


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


def decode_row(engine: Engine, depth: int | None, tokens: int, repeats: int, prompt: str = PROMPT) -> Row:
    """Decode `tokens` tokens `repeats` times after one warm-up."""
    ids = torch.tensor(engine.tokenizer(prompt)["input_ids"])
    engine.generate(ids, min(tokens, 32), depth=depth)
    runs = []
    for _ in range(repeats):
        engine.stats = Meter()
        engine.generate(ids, tokens, depth=depth)
        runs.append(engine.stats)
    meter = sorted(runs, key=lambda run: run.seconds / run.tokens)[len(runs) // 2]
    moved = meter.h2d_bytes + meter.read_through_bytes
    return Row(
        slots_per_layer=int(engine.memory.slots.count.min()), depth="online" if depth is None else str(depth),
        ms_per_token=1e3 * meter.seconds / meter.tokens, acceptance=meter.acceptance,
        tokens_per_round=meter.tokens_per_round, hit_rate=meter.hits / meter.needed,
        link_bytes_per_token=moved / meter.tokens, link_gb_s=moved / meter.seconds / 1e9,
    )  # fmt: skip


def pass_ms(engine: Engine, repeats: int = 20) -> dict[str, float]:
    """Medians of one draft step and of verifying 1, 9 and 17 tokens, by device events on a GPU."""
    session = engine._session_for(256, 16, 0.0)
    found = {}
    passes = {"draft step": session.draft_step, **{f"verify {n}": (lambda n=n: session.verify(n)) for n in (1, 9, 17)}}
    with torch.inference_mode():
        for name, run in passes.items():
            times = []
            for _ in range(repeats):
                session.position.fill_(64)
                session.step.zero_()
                times.append(_timed_ms(run, session.window.is_cuda))
            found[name] = median(times[3:])
    return found


def _timed_ms(run, on_gpu: bool) -> float:
    if not on_gpu:
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen-nano")
    parser.add_argument("--widen-to", default=None)
    parser.add_argument("--slots", type=int, nargs="+", default=[60, 15])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows, passes = [], {}
    for slots in options.slots:
        began = time.perf_counter()
        engine = load(options.model, expert_budget=slots, in_slots=True, widen_to=options.widen_to)
        print(f"{options.model}, {slots} slots per layer, loaded in {time.perf_counter() - began:.1f} s; "
              f"copy {engine.memory.copy_ms:.3f} ms; {engine.budget.taken}")  # fmt: skip
        if slots >= engine.memory.shape.num_experts:
            engine.fill_slots()
            passes = pass_ms(engine)
            print("  ".join(f"{name} {ms:.3f} ms" for name, ms in passes.items()))
        for depth in DEPTHS:
            row = decode_row(engine, depth, options.tokens, options.repeats)
            rows.append(row)
            print(f"  slots {row.slots_per_layer:3d} K {row.depth:>6s} {row.ms_per_token:8.3f} ms/token  acceptance "
                  f"{row.acceptance:.3f}  tokens/round {row.tokens_per_round:5.2f}  hits {row.hit_rate:.3f}  "
                  f"{row.link_bytes_per_token / 1e6:8.1f} MB/token  link {row.link_gb_s:5.1f} GB/s")  # fmt: skip
        del engine
    if options.json:
        options.json.write_text(json.dumps({"passes_ms": passes, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
