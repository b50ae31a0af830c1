"""Guard: what every request passes before a route is looked up; pure ASGI."""

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trt_lora.runtime.server.errors import HttpError

_GUARDED = ("/v1", "/v2", "/inference", "/adapters", "/invocations")
_ADMIN = re.compile(
    r"(/v1/(un)?load_lora_adapter|/v1/lora_adapters/.+/(un)?pin|/adapters(/.*)?)\n?",  # as routes
    re.DOTALL,
)
MOST_BYTES = 4 << 20  # of a body


@dataclass(frozen=True)
class GuardConfig:
    """Who may ask, and how much."""

    api_keys: Sequence[str] = ()  # none: everybody who reaches the port
    admin_key: str | None = None  # the only one that changes adapters; None: the others do
    allowed_hosts: Sequence[str] = ("127.0.0.1", "localhost", "[::1]")  # of the header; "*": any


class Guard:
    """Refuses wrong keys, foreign hosts and large bodies; keys are compared in constant time."""

    def __init__(self, app: ASGIApp, config: GuardConfig) -> None:
        """Stand before an application."""
        self._app, self._config = app, config
        self._keys = [_digest(key.encode()) for key in config.api_keys]
        self._admin_keys = [_digest(config.admin_key.encode())] if config.admin_key else self._keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            return await refusal(scope, receive, send)
        await self._app(scope, _bounded(receive), send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        if not self._is_host_allowed(headers.get(b"host", b"")):
            text = "the Host header names another machine; see --allowed-host"
            return HttpError(400, text).response()
        if not self._has_key(scope, headers.get(b"authorization", b"")):
            return JSONResponse({"error": "Unauthorized"}, 401)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MOST_BYTES:
            return _too_large().response()
        return None

    def _has_key(self, scope: Scope, header: bytes) -> bool:
        """Whether a request has the key that its path needs."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["method"] == "OPTIONS" or not path.startswith(_GUARDED):
            return True
        keys = self._admin_keys if _ADMIN.fullmatch(path) else self._keys
        scheme, _, given = header.partition(b" ")
        found = [hmac.compare_digest(_digest(given), key) for key in keys]  # all, whichever it is
        return not keys or (scheme.lower() == b"bearer" and any(found))

    def _is_host_allowed(self, header: bytes) -> bool:
        name = re.sub(r":\d*$", "", header.decode("latin-1")).lower()
        allowed = self._config.allowed_hosts
        return "*" in allowed or not name or name in allowed


def _bounded(receive: Receive) -> Receive:
    """A body of no stated length is counted as it comes."""
    taken = 0

    async def receiving() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > MOST_BYTES:
            raise _too_large()
        return message

    return receiving


def _too_large() -> HttpError:
    return HttpError(413, f"a body has at most {MOST_BYTES} bytes")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
