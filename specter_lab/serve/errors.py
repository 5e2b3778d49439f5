"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from specter_lab.errors import UserError
from specter_lab.serve.line import Closing, Full

RETRY_AFTER_S = 1
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "server_error",
    500: "server_error",
}


class ApiError(Exception):
    """An answer other than the one that was asked for."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error; a bug is logged with its trace and told without."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, Full):
        return ApiError(429, "as many requests wait as may: try again in a moment", code="queue_full")
    if isinstance(error, Closing):
        return ApiError(503, "the server is shutting down", code="shutting_down")
    logging.getLogger("specter_lab.serve").error("a request failed", exc_info=error)
    return ApiError(500, "a bug in the server: its log has the trace", code="internal_error")


def body(error: ApiError) -> dict:
    """The JSON of an error."""
    kind = TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def answer(error: BaseException) -> JSONResponse:
    """The response to a request that failed."""
    told = as_api_error(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if told.status in (429, 503) else {}
    if told.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body(told), told.status, headers)


def _is_type(part: int | str) -> bool:
    """Whether a part of a place in the body names one of a field's types instead of a field."""
    return isinstance(part, str) and (part == "str" or "[" in part)


def install(app: FastAPI) -> None:
    """Let every error of `app` be answered like this."""

    async def failed(_: Request, error: Exception) -> JSONResponse:
        return answer(error)

    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return answer(ApiError(400, f"the body is no JSON: {first['ctx']['error']}"))
        if "json" not in request.headers.get("content-type", ""):
            return answer(ApiError(400, "send JSON with the header 'Content-Type: application/json'"))
        param = ".".join(str(part) for part in first["loc"] if part != "body" and not _is_type(part)) or None
        return answer(ApiError(400, f"{param or 'the body'}: {first['msg']}", param=param))

    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        known = {404: f"there is no {request.method} {request.url.path}", 405: f"{request.url.path} takes no {request.method}",
                 413: "the request is too large: send less text"}  # fmt: skip
        return answer(ApiError(error.status_code, known.get(error.status_code, str(error.detail))))

    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, refused)
    for kind in (ApiError, UserError, Full, Closing, Exception):
        app.add_exception_handler(kind, failed)
