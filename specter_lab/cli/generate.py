"""`specter-lab generate`."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from specter_lab.cli.command import Answer, Command, add, drafts, number, policies, positive, whole
from specter_lab.cli.engine_options import add_engine, load_served
from specter_lab.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    add_engine(parser)
    parser.add_argument("prompt", nargs="?", default="-", metavar="PROMPT", help="text; - or nothing: standard input")
    add(parser, "--prompt-file", files=True, type=Path, metavar="FILE", help="read it from a file instead")
    add(parser, "--max-tokens", type=positive, default=128, metavar="N", help="at most so many new ones (default: 128)")
    add(parser, "--temperature", type=number, default=0.0, metavar="T", help="0: greedy (default); 1: the model's own")
    add(parser, "--seed", type=whole, default=0, metavar="N", help="of sampling (default: 0)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print text and numbers as JSON when done")


def run(options: argparse.Namespace) -> Answer:
    prompt = _prompt(options)
    if not prompt.strip():
        raise UserError("the prompt is empty: give some words to go on from")
    from specter_lab.serve.model import counted
    from specter_lab.serve.write import Ask, check_ask, check_sampling, write

    ask = Ask((), options.max_tokens, options.temperature, options.seed, tuple(options.stop))
    check_sampling(ask)
    served = load_served(options)
    ids = served.tokenizer(prompt)["input_ids"]
    ask = replace(ask, ids=tuple(ids))
    check_ask(served, ask)
    start, first_s, text, piece = time.perf_counter(), None, "", None
    for piece in write(served, ask):
        first_s = first_s or time.perf_counter() - start
        text += piece.text
        if not options.json:
            print(piece.text, end="", flush=True)
    if not options.json:
        print()
    numbers = {"prompt_tokens": len(ids), "new_tokens": piece.tokens, "finish_reason": piece.finish,
               "time_to_first_token_ms": 1e3 * first_s, **counted(served.engine)}  # fmt: skip
    print(_lines(numbers), file=sys.stderr)
    return Answer({"model": served.name, "prompt": prompt, "text": text, **numbers})


def _lines(found: dict) -> str:
    per_s, accepted, hits, moved = (
        found[k] for k in ("tokens_per_s", "acceptance", "hit_rate", "expert_bytes_per_token")
    )
    return (f"\n{found['new_tokens']} tokens ({found['finish_reason']}), {per_s:.1f} tokens/s on {found['device']}, first after "
            f"{found['time_to_first_token_ms']:.0f} ms\n"
            f"acceptance {'-' if accepted is None else f'{accepted:.1%}'}, {found['tokens_per_round']:.2f} tokens per round, "
            f"hit rate {hits:.1%}, {moved / 1e6:.3f} MB of experts per token\n"
            f"policy {found['policy']}, draft {found['draft']}, {found['slots_per_layer']} of {found['experts_per_layer']} experts per layer in "
            f"slots")  # fmt: skip


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt_file is not None:
        if options.prompt != "-":
            raise UserError("a prompt and --prompt-file: give one of them")
        try:
            return options.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {options.prompt_file} ({error}): give a file of UTF-8 text") from error
    if options.prompt != "-":
        return options.prompt
    if sys.stdin.isatty():
        raise UserError(
            'no prompt: give it in quotes, e.g. specter-lab generate qwen-nano "Once upon a time", or pipe it in'
        )
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 text ({error.reason}): convert it first") from error


COMMAND = Command(
    "generate", "continue a text; shows tokens/s, acceptance, hits, bytes",
    'specter-lab generate qwen-nano "The old man walked along"\n'
    'specter-lab generate qwen-nano "Once upon" --slots 4 --temperature 0.8 --seed 7\n'
    "specter-lab generate path/to/checkpoint --expert-budget 6GiB < prompt.txt > text.txt\n"
    'specter-lab generate qwen-nano "The end" --draft gptq-int4        # quantised on the first call, then kept\n'
    'specter-lab generate qwen-nano "The end" --draft none --json      # plain decoding: the same greedy text',
    arguments, run, names=lambda: {"policies": policies(), "drafts": drafts()},
    description="Decodes with the routed experts in host memory and as many as the budget holds on the device. The text goes to "
                "standard output as it is written, the numbers to standard error.",
)  # fmt: skip
