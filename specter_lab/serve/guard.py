"""Who may ask: looked at before a byte of the body is read."""

from __future__ import annotations

import secrets
from collections.abc import Collection

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from specter_lab.serve.errors import ApiError, answer


class Guard:
    """Refuses requests without the key, by a strange host name, or with a body that is too large.

    Args:
        api_key: of every request; None: none is needed.
        hosts: names this server may be called by, lower case; None: any. Without a key this keeps out web pages that point a name
            of their own at this machine.
        max_body_bytes: by the request's own account.
    """

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, hosts: Collection[str] | None, max_body_bytes: int
    ) -> None:
        self._app, self._key, self._hosts, self._max_body_bytes = app, api_key, hosts, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(Request(scope)) if scope["type"] == "http" else None
        await (self._app if error is None else answer(error))(scope, receive, send)

    def _error(self, request: Request) -> ApiError | None:
        if self._hosts is not None and (request.url.hostname or "").lower() not in self._hosts:
            return ApiError(403, f"this server is not called '{request.url.hostname}'", code="unknown_host")
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._key and not secrets.compare_digest(key.encode(), self._key.encode()):
            return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return ApiError(413, f"a request of more than {self._max_body_bytes:,} bytes: send less text")
        return None
