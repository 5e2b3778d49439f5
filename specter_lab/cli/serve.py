"""`specter-lab serve`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import replace

from specter_lab.cli.command import Answer, Command, add, drafts, policies, positive, whole
from specter_lab.cli.engine_options import add_engine, load_served
from specter_lab.errors import UserError

KEY = "SPECTER_LAB_API_KEY"


def arguments(parser: argparse.ArgumentParser) -> None:
    add_engine(parser)
    group = parser.add_argument_group("who may ask, and for how much")
    add(group, "--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine only")
    add(group, "--port", type=whole, default=8000, metavar="N", help="default: 8000; 0: a free one")
    add(group, "--api-key", default=os.environ.get(KEY), metavar="KEY",
        help=f"clients must send it; needed for any other address (better as {KEY}, which no list of processes shows)")  # fmt: skip
    add(group, "--name", metavar="NAME", help="what clients call the model (default: its own name)")
    add(
        group,
        "--max-tokens",
        type=positive,
        default=1024,
        metavar="N",
        help="new tokens of a request, at most (default: 1024)",
    )
    add(
        group,
        "--max-context",
        type=positive,
        metavar="N",
        help="tokens of prompt and text together (default: the model's)",
    )
    add(group, "--lanes", type=positive, default=1, metavar="N",
        help="requests written together (default: 1), in fast mode as many as 64 tokens' windows hold; each has room for the longest")  # fmt: skip
    add(group, "--max-waiting", type=whole, default=8, metavar="N",
        help="requests that may wait; one more is told 429 (default: 8)")  # fmt: skip
    add(
        group,
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web page that may ask; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print address and model as one line of JSON")


def run(options: argparse.Namespace) -> Answer:
    try:
        import uvicorn  # noqa: F401
        from fastapi import FastAPI  # noqa: F401
    except ImportError as error:
        raise UserError(f"serving needs {error.name}: `pip install 'specter-lab[serve]'`, or `make setup`") from error
    from specter_lab.serve.app import Limits
    from specter_lab.serve.server import check_access, open_socket
    from specter_lab.serve.server import run as serve

    if options.max_waiting < 0:
        raise UserError(f"{options.max_waiting} requests cannot wait: give 0 or more")
    check_access(options.host, options.api_key)
    open_socket(options.host, options.port).close()  # or a model is read for nothing
    served = load_served(options)
    room = min(served.context_tokens, options.max_context or served.context_tokens)
    served = replace(served, name=options.name or served.name, context_tokens=room)
    if not served.tokenizer.chat_template:
        print(f"{served.name} has no chat template: conversations are written as a transcript", file=sys.stderr)

    def started(url: str) -> None:
        data = {"url": url, "model": served.name}
        out = sys.__stdout__ if options.json else sys.stdout
        print(json.dumps(data) if options.json else f"{served.name} at {url} (Ctrl-C stops)", file=out, flush=True)

    ended_by = serve(served, host=options.host, port=options.port, api_key=options.api_key, origins=options.allow_origin,
                     limits=Limits(options.max_tokens, options.max_waiting, options.lanes), on_start=started)  # fmt: skip
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt
    return Answer(None)


COMMAND = Command(
    "serve", "OpenAI's completions and chat protocol over one model",
    "specter-lab serve qwen-nano                           # http://127.0.0.1:8000/v1, no key\n"
    "specter-lab serve path/to/checkpoint --expert-budget 12GiB --mode paper --lanes 8\n"
    "specter-lab serve path/to/checkpoint --draft path/to/its-gptq-checkpoint --transport residual\n"
    f"{KEY}=... specter-lab serve qwen-nano --host 0.0.0.0\n"
    "curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\\n"
    "     -d '{\"model\": \"qwen-nano\", \"prompt\": \"The old man\", \"stream\": true}'",
    arguments, run, names=lambda: {"policies": policies(), "drafts": drafts()},
    description="Serves /v1/models, /v1/completions and /v1/chat/completions, whole or streamed, with stop, seed, temperature, "
                "max_tokens and usage; parameters that it cannot honour are refused, not ignored. One request is written at a "
                "time, or --lanes of them together, the others wait in line; one whose client hangs up is dropped after its round.",
)  # fmt: skip
