"""Requests and responses of OpenAI's completions and chat protocol, as far as the engine can serve them.

A parameter that would change the text and is not served is refused, unless it is given as what happens anyway (`top_p=1`); one
that changes nothing here (`user`) is ignored.
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from specter_lab.serve.errors import ApiError
from specter_lab.serve.write import MAX_TEMPERATURE, Piece

MAX_STOPS = 4
NOT_SERVED = {  # parameter -> values that ask for nothing
    "n": (1,), "best_of": (1,), "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "logprobs": (False,), "top_logprobs": (0,),
    "echo": (False,), "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (),
    "prediction": (), "web_search_options": (), "reasoning_effort": ("none",), "verbosity": (),
}  # fmt: skip
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
           "parallel_tool_calls"}  # fmt: skip

Stop = Annotated[str, Field(min_length=1)]
Stops = Annotated[
    list[Stop], Field(max_length=MAX_STOPS), BeforeValidator(lambda given: [given] if isinstance(given, str) else given)
]


class StreamOptions(BaseModel):
    include_usage: bool = False


class Asked(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(extra="allow")

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None  # None: 1, the protocol's default
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def refuse_what_is_not_served(self) -> None:
        """Raises ApiError."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED or any(value == none for none in NOT_SERVED.get(name, ())):
                continue
            why = "is not served here: leave it out" if name in NOT_SERVED else "is no parameter of this request"
            raise ApiError(400, f"'{name}' {why}", param=name, code="unsupported_parameter")


class CompletionAsked(Asked):
    prompt: str | list[int] | list[str]


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


def _parts(given: object) -> object:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_parts)]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ChatAsked(Asked):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class Format:
    """The JSON of one response: whole, or chunk by chunk."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self._chat = chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._common = {"created": int(time.time()), "model": model}

    def whole(self, text: str, finish: str, usage: dict) -> dict:
        part = {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
        name = "chat.completion" if self._chat else "text_completion"
        return self._object(name, [self._choice(part, finish)]) | {"usage": usage}

    def opening(self) -> list[dict]:
        """What comes before the first piece of a stream."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}}, None)] if self._chat else []

    def chunk(self, piece: Piece) -> dict:
        part = {"delta": {"content": piece.text} if piece.text else {}} if self._chat else {"text": piece.text}
        return self._chunk(part, piece.finish)

    def usage_chunk(self, usage: dict) -> dict:
        return self._object(self._stream_name, []) | {"usage": usage}

    def _chunk(self, part: dict, finish: str | None) -> dict:
        return self._object(self._stream_name, [self._choice(part, finish)])

    @property
    def _stream_name(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _object(self, name: str, choices: list[dict]) -> dict:
        return {"id": self._id, "object": name, **self._common, "choices": choices}

    @staticmethod
    def _choice(part: dict, finish: str | None) -> dict:
        return {"index": 0, **part, "logprobs": None, "finish_reason": finish}


def usage_of(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """Counted tokens."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens, "total_tokens": prompt_tokens + new_tokens}
