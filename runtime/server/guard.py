"""Guard: what every request passes before a route is looked up; pure ASGI."""

import hashlib
import hmac
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trt_lora.runtime.server.errors import HttpError

_GUARDED = ("/v1", "/v2", "/inference", "/adapters", "/invocations")
MOST_BYTES = 4 << 20  # of a body


@dataclass(frozen=True)
class GuardConfig:
    """Who may ask, and how much."""

    api_keys: Sequence[str] = ()  # none: everybody who reaches the port
    allowed_hosts: Sequence[str] = ("127.0.0.1", "localhost", "[::1]")  # of the header; "*": any
    returns_ids: bool = False  # X-Request-Id comes back, made where there is none


class Guard:
    """Refuses wrong keys, foreign hosts and large bodies; keys are compared in constant time."""

    def __init__(self, app: ASGIApp, config: GuardConfig) -> None:
        """Stand before an application."""
        self._app, self._config = app, config
        self._keys = [_digest(key.encode()) for key in config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        if self._config.returns_ids:
            send = _with_id(send, headers.get(b"x-request-id") or uuid.uuid4().hex.encode())
        if not self._is_host_allowed(headers.get(b"host", b"")):
            error = HttpError(400, "the Host header names another machine; see --allowed-host")
            return await _refuse(error, scope, receive, send)
        if self._needs_key(scope) and not self._has_key(headers.get(b"authorization", b"")):
            return await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MOST_BYTES:
            error = HttpError(413, f"a body has at most {MOST_BYTES} bytes")
            return await _refuse(error, scope, receive, send)
        await self._app(scope, receive, send)

    def _needs_key(self, scope: Scope) -> bool:
        return (
            bool(self._keys) and scope["method"] != "OPTIONS" and scope["path"].startswith(_GUARDED)
        )

    def _has_key(self, header: bytes) -> bool:
        given = _digest(header.removeprefix(b"Bearer "))
        found = [hmac.compare_digest(given, key) for key in self._keys]  # all, whichever it is
        return any(found)

    def _is_host_allowed(self, header: bytes) -> bool:
        name = header.decode("latin-1").rpartition(":")[0] or header.decode("latin-1")
        allowed = self._config.allowed_hosts
        return "*" in allowed or not name or name in allowed


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _with_id(send: Send, identity: bytes) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"], (b"x-request-id", identity)]
            message = {**message, "headers": headers}
        await send(message)

    return sending


async def _refuse(error: HttpError, scope: Scope, receive: Receive, send: Send) -> None:
    body = JSONResponse(None, error.status)
    body.body = error.body()
    body.init_headers()
    await body(scope, receive, send)
