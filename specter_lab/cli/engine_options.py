"""What `generate` and `serve` ask of the engine."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from specter_lab.cli.command import add, add_model, drafts, policies, whole
from specter_lab.errors import UserError

if TYPE_CHECKING:
    from specter_lab.serve.model import Served

MODES = ("fast", "paper", "shared")
TRANSPORTS = ("whole", "residual")


def add_engine(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    group = parser.add_argument_group("where the experts lie")
    add(
        group,
        "--expert-budget",
        metavar="SIZE",
        help="device memory of the expert slots, e.g. 6GiB (default: half the experts)",
    )
    add(group, "--slots", type=whole, metavar="N", help="the same, as expert slots per layer")
    add(group, "--memory-budget", metavar="SIZE", help="of everything on the device (default: no limit)")
    add(
        group,
        "--mode",
        words=lambda: MODES,
        metavar="MODE",
        help=f"{', '.join(MODES)} (default: fast; paper where nothing drafts and experts lack slots)",
    )
    add(group, "--policy", words=policies, metavar="NAME", help="an exact policy (default: the mode's)")
    add(group, "--draft", words=drafts, files=True, default="int4", metavar="DRAFT",
        help="whose 4-bit experts draft; the text is the same: int4 (default: rounded here), a quantiser as gptq-int4 (run first if "
             "the cache lacks its codes), a GPTQ checkpoint of this model, or none")  # fmt: skip
    add(group, "--transport", words=lambda: TRANSPORTS, default="whole", metavar="WAY",
        help="whole (default), or residual: experts cross the link without what the draft's codes say, bit for bit the same")  # fmt: skip
    add(
        group,
        "--depth",
        type=whole,
        metavar="K",
        help="drafted tokens per round (default: the policy's, or chosen online)",
    )
    add(group, "--device", metavar="DEVICE", help="default: the GPU if there is one")


def load_served(options: argparse.Namespace) -> Served:
    """The model with its engine, as asked for.

    Raises:
        UserError: a budget, mode, draft, depth, device or model that cannot be.
    """
    for name, known in (("mode", (None, *MODES)), ("transport", TRANSPORTS)):
        if getattr(options, name) not in known:
            raise UserError(f"no {name} '{getattr(options, name)}': choose {', '.join(filter(None, known))}")
    if options.slots is not None and options.expert_budget is not None:
        raise UserError("--slots and --expert-budget say the same thing: give one of them")
    from specter_lab.engine.api import MAX_DEPTH, engine_for, in_bytes
    from specter_lab.engine.draft import prepare_draft
    from specter_lab.engine.weights import load_weights
    from specter_lab.models.load import check_device
    from specter_lab.serve.model import served

    if options.depth is not None and not 0 <= options.depth <= MAX_DEPTH:
        raise UserError(f"a depth of {options.depth} is not drafted here: give 0 to {MAX_DEPTH}")
    if options.slots is not None and options.slots < 1:
        raise UserError(f"{options.slots} slots per layer hold no expert: give 1 or more")
    for size in (options.expert_budget, options.memory_budget):
        in_bytes(size or 0)  # before the weights are read
    if options.device is not None:
        check_device(options.device)
    prepare_draft(options.model, options.draft)
    print(f"loading {options.model} ...", file=sys.stderr)
    weights = load_weights(options.model, device=options.device)
    slots = options.slots or max(1, weights.shape.num_experts // 2)
    budget = (
        {"expert_budget": options.expert_budget}
        if options.expert_budget
        else {"expert_budget": slots, "in_slots": True}
    )
    if options.memory_budget is not None:
        budget["memory_budget"] = options.memory_budget
    engine = engine_for(
        weights, mode=options.mode, policy=options.policy, draft=options.draft, transport=options.transport, **budget
    )
    return served(engine, options.model, depth=options.depth)
