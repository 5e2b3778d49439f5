"""OpenAI's protocol over one engine: /v1/models, /v1/completions, /v1/chat/completions, and /health."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from specter_lab.errors import UserError
from specter_lab.serve.chat import chat_stops, prompt_ids
from specter_lab.serve.errors import ApiError, as_api_error, body, install
from specter_lab.serve.guard import Guard
from specter_lab.serve.line import Job, Line
from specter_lab.serve.model import Served, counted
from specter_lab.serve.protocol import Asked, ChatAsked, CompletionAsked, Format, usage_of
from specter_lab.serve.write import Ask, Piece, check_ask

COMPLETION_TOKENS = 16  # where a completion does not say; a chat may go on to the limit
MAX_BODY_BYTES = 2**21  # that a request may announce; one that announces nothing is cut off at twice that
NOBODY_READS = 499

Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """What one client may ask of the others' patience."""

    max_tokens: int = 1024  # new ones, of a request
    max_waiting: int = 8  # requests beside those that are written
    lanes: int = 1  # requests that are written together


def new_app(
    served: Served, line: Line, *, limits: Limits, api_key: str | None, hosts: Sequence[str] | None = None,
    origins: Sequence[str] = (),
) -> FastAPI:  # fmt: skip
    """The application.

    Args:
        api_key: what clients must send; None: nothing.
        hosts: names that requests may call this server by, lower case, so that no web page reaches it under a name of its own;
            None: any.
        origins: web pages that browsers may send requests from.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(line.join)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, max_body_size=2 * MAX_BODY_BYTES)
    install(app)

    app.add_middleware(Guard, api_key=api_key, hosts=hosts, max_body_bytes=MAX_BODY_BYTES)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])

    @app.get("/health")
    async def health() -> dict:
        return {
            "status": "ok",
            "model": served.name,
            "requests": line.inside,
            "lanes": line.lanes,
            "since_start": counted(served.engine),
        }

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [_model(served)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict:
        _check_model(served, name)
        return _model(served)

    @app.post("/v1/completions")
    async def completions(asked: CompletionAsked, request: Request) -> Response:
        _check_model(served, asked.model)
        asked.refuse_what_is_not_served()
        ids = await asyncio.to_thread(_completion_ids, served, asked)
        return await _respond(
            request, served, line, asked, _ask(served, asked, ids, COMPLETION_TOKENS, limits), chat=False
        )

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatAsked, request: Request) -> Response:
        _check_model(served, asked.model)
        asked.refuse_what_is_not_served()
        asked.max_tokens = asked.max_completion_tokens or asked.max_tokens
        ids = await asyncio.to_thread(prompt_ids, served.tokenizer, asked.messages)
        room = max(1, min(limits.max_tokens, served.context_tokens - len(ids)))
        ask = _ask(served, asked, ids, room, limits, chat_stops(served.tokenizer))
        return await _respond(request, served, line, asked, ask, chat=True)

    return app


def _model(served: Served) -> dict:
    return {
        "id": served.name,
        "object": "model",
        "created": 0,
        "owned_by": "specter_lab",
        "max_model_len": served.context_tokens,
    }


def _check_model(served: Served, name: str) -> None:
    if name != served.name:
        raise ApiError(
            404,
            f"the model '{name}' is not served here: ask for '{served.name}'",
            param="model",
            code="model_not_found",
        )


def _completion_ids(served: Served, asked: CompletionAsked) -> list[int]:
    prompt = asked.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        if len(prompt) > 1:
            raise ApiError(400, f"{len(prompt)} prompts: send one request for each", param="prompt")
        prompt = prompt[0]
    return served.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt


def _ask(
    served: Served, asked: Asked, ids: Sequence[int], default_tokens: int, limits: Limits, stops: Sequence[str] = ()
) -> Ask:
    max_tokens = asked.max_tokens or default_tokens
    if max_tokens > limits.max_tokens:
        raise ApiError(
            400,
            f"{max_tokens} new tokens are asked for: this server writes up to {limits.max_tokens}",
            param="max_tokens",
        )
    temperature = 1.0 if asked.temperature is None else asked.temperature
    ask = Ask(tuple(ids), max_tokens, temperature, asked.seed, (*(asked.stop or ()), *stops))
    try:
        check_ask(served, ask)
    except UserError as error:
        too_long = len(ids) + max_tokens > served.context_tokens
        raise ApiError(400, str(error), code="context_length_exceeded" if too_long else None) from error
    return ask


async def _respond(request: Request, served: Served, line: Line, asked: Asked, ask: Ask, *, chat: bool) -> Response:
    """Line up, wait for the first piece (so that what fails before it has its status), and answer as was asked."""
    job = line.enter(ask)
    pieces, form = job.pieces(), Format(served.name, chat=chat)
    try:
        first = await _unless_gone(request, anext(pieces))
        if asked.stream:
            events = _events(_chain(first, pieces), form, len(ask.ids), asked.wants_usage)
            return EventStream(events, job)
        text, last = await _unless_gone(request, _gathered(_chain(first, pieces)))
    except ClientDisconnect:
        job.cancel()
        return Response(status_code=NOBODY_READS)
    except BaseException:
        job.cancel()
        raise
    return JSONResponse(form.whole(text, last.finish, usage_of(len(ask.ids), last.tokens)))


async def _chain(first: Piece, others: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    yield first
    async for piece in others:
        yield piece


async def _gathered(pieces: AsyncIterator[Piece]) -> tuple[str, Piece]:
    text = []
    async for piece in pieces:
        text.append(piece.text)
    return "".join(text), piece


async def _events(
    pieces: AsyncIterator[Piece], form: Format, prompt_tokens: int, wants_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events; an error on the way is one of them."""
    try:
        for chunk in form.opening():
            yield _event(chunk)
        async for piece in pieces:
            if piece.text or piece.finish:
                yield _event(form.chunk(piece))
        if wants_usage:
            yield _event(form.usage_chunk(usage_of(prompt_tokens, piece.tokens)))
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield _event(body(as_api_error(error)))


def _event(content: dict) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class EventStream(StreamingResponse):
    """A stream that cancels its job when it ends, whoever ended it."""

    def __init__(self, events: AsyncIterator[str], job: Job) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result, or ClientDisconnect as soon as whoever asked hangs up."""
    wanted, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((wanted, gone), return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise ClientDisconnect
        return wanted.result()
    finally:
        for task in (wanted, gone):
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
