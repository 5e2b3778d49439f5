"""`specter-lab quantize`."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from specter_lab.cli.command import Answer, Command, add, add_model, add_seed, positive, quantizers
from specter_lab.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add(
        parser,
        "--quantizer",
        words=quantizers,
        default="gptq-int4",
        metavar="NAME",
        help="by name (default: gptq-int4)",
    )
    add(parser, "--out", files=True, type=Path, metavar="FOLDER", help="a copy goes here (default: the cache alone)")
    add(parser, "--calibration", files=True, type=Path, metavar="FILE", help="JSON lines with a field 'text' (default: the "
        "project's)")  # fmt: skip
    add(parser, "--sequences", type=positive, metavar="N", help="of calibration text (default: 128)")
    add(parser, "--length", type=positive, metavar="N", help="tokens of each (default: 256)")
    add_seed(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> Answer:
    if options.out and options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise UserError(f"{options.out} is there already: remove it, or give --out another folder")
    from specter_lab import paths
    from specter_lab.compress.calibration import calibration_ids
    from specter_lab.compress.checkpoint import load_quantized
    from specter_lab.compress.quantizers import QUANTIZERS, quantize
    from specter_lab.compress.report import read_report
    from specter_lab.files import whole_folder
    from specter_lab.models.load import load, placement

    if options.quantizer not in QUANTIZERS:
        raise UserError(f"no quantiser '{options.quantizer}': choose one of {', '.join(QUANTIZERS)}")
    given = {"sequences": options.sequences, "length": options.length, "path": options.calibration}
    source = load(options.model, **placement(options.model))
    ids = calibration_ids(source.tokenizer, seed=options.seed, **{k: v for k, v in given.items() if v is not None})
    print(f"quantising {source.name}: {options.quantizer} ...", file=sys.stderr)
    folder = quantize(source, options.quantizer, ids, paths.CACHE / "quantized")
    report, experts = read_report(folder), load_quantized(folder, source)
    if options.out:
        with whole_folder(options.out) as half:
            shutil.copytree(folder, half, dirs_exist_ok=True)
        folder = options.out
    starved = len(report.coverage.starved)
    data = {
        "folder": str(folder), "model": source.name, "quantizer": report.quantizer,
        "bits_per_weight": experts.bits_per_weight, "bytes": sum(file.stat().st_size for file in folder.rglob("*")),
        "calibration_tokens": ids.numel(), "starved_experts": starved, "fallbacks": list(report.fallbacks),
        "seconds": report.seconds,
    }  # fmt: skip
    lines = [f"{source.name}, {report.quantizer}: {experts.bits_per_weight:.2f} bits per expert weight, made in "
             f"{report.seconds:.0f} s", f"calibration: {ids.numel():,} tokens reached all but {starved} experts",
             *(f"note: {note}" for note in report.fallbacks), f"in {folder} ({data['bytes'] / 1e6:.1f} MB)"]  # fmt: skip
    return Answer(data, "\n".join(lines))


COMMAND = Command(
    "quantize", "make a checkpoint with quantised experts (GPTQ, AWQ, GGUF, round to nearest)",
    "specter-lab quantize qwen-nano --quantizer rtn-int4 --out qwen-nano-int4/\n"
    "specter-lab quantize path/to/checkpoint --quantizer awq-int4 --calibration mine.jsonl\n"
    "specter-lab measure qwen-nano --quantizer qwen-nano-int4/\n"
    'specter-lab generate qwen-nano "The end" --draft qwen-nano-int4/',
    arguments, run, names=lambda: {"quantisers": quantizers()},
    description="Quantises the routed experts and nothing else. What was made is kept in the cache: the same question is "
                "answered at once. The folder has a report of what made it, and of experts that calibration did not reach.",
)  # fmt: skip
