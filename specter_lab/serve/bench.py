"""What the protocol costs: the same greedy text from the engine alone and through a server on this machine.

    python -m specter_lab.serve.bench --model qwen-nano --tokens 256 --slots 60

Prints, for both, milliseconds to the first piece and tokens per second from asking to the end: medians of repeats that take
turns. Client and server share this process, so the difference is an upper bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from statistics import median

import uvicorn

from specter_lab.engine.api import load
from specter_lab.serve.app import Limits, new_app
from specter_lab.serve.line import Line
from specter_lab.serve.model import Served, served
from specter_lab.serve.server import open_socket
from specter_lab.serve.write import Ask, write

PROMPT = "The old man walked along the river, and when he came to the bridge he said to his son that"


def timed(pieces: Iterator[tuple[str, int]]) -> tuple[str, float, float]:
    """Text, milliseconds to its first piece, and tokens per second of all, from (text, tokens so far)."""
    start, first, text, tokens = time.perf_counter(), None, "", 0
    for piece, tokens in pieces:
        first = first or time.perf_counter()
        text += piece
    return text, 1e3 * (first - start), tokens / (time.perf_counter() - start)


def alone(model: Served, tokens: int) -> Iterator[tuple[str, int]]:
    """From the engine itself."""
    ids = tuple(model.tokenizer(PROMPT)["input_ids"])
    for piece in write(model, Ask(ids, tokens)):
        yield piece.text, piece.tokens


def through(address: tuple[str, int], model: str, tokens: int) -> Iterator[tuple[str, int]]:
    """From a stream; only its last chunk, with the usage, counts tokens."""
    connection = HTTPConnection(*address)
    asked = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True,
             "stream_options": {"include_usage": True}}  # fmt: skip
    connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            if chunk["choices"]:
                yield chunk["choices"][0]["text"], 0
            else:
                yield "", chunk["usage"]["completion_tokens"]
    connection.close()


@contextmanager
def listening(model: Served, tokens: int) -> Iterator[tuple[str, int]]:
    """A server in a thread; yields its address."""
    line, sock = Line(model, 0), open_socket("127.0.0.1", 0)
    app = new_app(model, line, limits=Limits(max_tokens=tokens), api_key=None)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    try:
        yield sock.getsockname()
    finally:
        server.should_exit = True
        thread.join()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen-nano")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--slots", type=int, default=60, help="expert slots per layer")
    parser.add_argument("--depth", type=int, default=4, help="drafted tokens per round")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    model = served(load(options.model, expert_budget=options.slots, in_slots=True), options.model, depth=options.depth)
    found: dict[str, list] = {"engine alone": [], "through the server": []}
    with listening(model, options.tokens) as address:
        for repeat in range(options.repeats + 1):  # the first one warms up
            runs = (timed(alone(model, options.tokens)), timed(through(address, model.name, options.tokens)))
            assert runs[0][0] == runs[1][0], "the server wrote another text than the engine"
            for rows, run in zip(found.values(), runs if repeat else ()):
                rows.append(run)
    print(f"{model.name} on {model.engine.device}, {options.tokens} tokens, K = {options.depth}, n = {options.repeats}")
    for name, rows in found.items():
        print(
            f"  {name:<20} first piece {median(r[1] for r in rows):7.1f} ms   {median(r[2] for r in rows):7.1f} tokens/s"
        )


if __name__ == "__main__":
    main()
