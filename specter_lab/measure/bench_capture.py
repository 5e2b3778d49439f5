"""Cost of routing capture beside a plain forward pass: `python -m specter_lab.measure.bench_capture`.

Random weights of a zoo shape in float32, 200 requests of 60..140 tokens. The two runs alternate, and the fastest of
each counts, so that other work on the machine does not decide the answer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from specter_lab.measure.capture import TOKEN_BUDGET, capture, length_batches
from specter_lab.measure.prompts import Request, TokenizedRequests
from specter_lab.measure.trace import Origin
from specter_lab.models.adapters import adapter_for
from specter_lab.models.zoo.shapes import SHAPES


def random_model(name: str, experts_implementation: str | None) -> PreTrainedModel:
    """A zoo shape with random weights, its routers widened so that all experts are used."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[name].config).eval().requires_grad_(False)
    for layer in adapter_for(model.config).moe_layers(model):
        torch.nn.init.normal_(layer.router.weight, std=1.0)
    if experts_implementation is not None:
        model.set_experts_implementation(experts_implementation)
    return model


def random_requests(count: int, vocab_size: int) -> TokenizedRequests:
    """Requests of 60..140 random tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(60, 141, (count,), generator=generator)
    requests = tuple(Request(f"random-{i}", "random", "generated", "none", "random tokens") for i in range(count))
    return TokenizedRequests(requests, tuple(torch.randint(3, vocab_size, (n,), generator=generator) for n in lengths))


@torch.inference_mode()
def plain_forward(model: PreTrainedModel, tokens: TokenizedRequests, token_budget: int) -> None:
    """The same batches as `capture`, unobserved."""
    for batch in length_batches(np.array([len(ids) for ids in tokens.ids]), token_budget):
        model.model(input_ids=pad_sequence([tokens.ids[r] for r in batch], batch_first=True), use_cache=False)


def fastest_s(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Shortest of `repeats` times in seconds of each run, the runs taking turns."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen-nano")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--token-budget", type=int, default=TOKEN_BUDGET)
    parser.add_argument("--experts", choices=("eager", "grouped_mm", "batched_mm"), help="default: the model's own")
    arguments = parser.parse_args()

    model = random_model(arguments.model, arguments.experts)
    tokens = random_requests(arguments.requests, model.config.vocab_size)
    origin = Origin(arguments.model, "random weights")
    budget = arguments.token_budget
    best = fastest_s(
        {
            "plain forward": lambda: plain_forward(model, tokens, budget),
            "capture": lambda: capture(model, tokens, origin, token_budget=budget),
        },
        arguments.repeats,
    )
    print(f"{arguments.model}, {tokens.num_tokens} tokens, {torch.get_num_threads()} threads, {budget} tokens a batch, "
          f"experts {model.config._experts_implementation}")  # fmt: skip
    for name, seconds in best.items():
        print(f"{name:14} {seconds:6.2f} s  {tokens.num_tokens / seconds:8,.0f} tokens/s")
    print(f"overhead       {best['capture'] / best['plain forward'] - 1:6.1%}")


if __name__ == "__main__":
    main()
