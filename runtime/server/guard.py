"""Guard: what every request passes before a route is looked up; pure ASGI."""

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trt_lora.runtime.server.errors import HttpError
from trt_lora.runtime.server.telemetry.request_record import record_of

_GUARDED = ("/v1", "/v2", "/inference", "/adapters", "/invocations")
_ADMIN = re.compile(
    r"(/v1/(un)?load_lora_adapter|/v1/lora_adapters/.+/(un)?pin|/adapters(/.*)?)\n?",  # as routes
    re.DOTALL,
)
_LOOKS = ("GET", "HEAD", "OPTIONS")
MOST_BYTES = 4 << 20  # of a body


@dataclass(frozen=True)
class GuardConfig:
    """Who may ask, and how much."""

    api_keys: Sequence[str] = ()  # none: everybody who reaches the port
    admin_key: str | None = None  # the only one that changes adapters; None: the others do
    # Of the header Host, so that no page of another name is let in. "*": any.
    allowed_hosts: Sequence[str] = ("127.0.0.1", "localhost", "[::1]")
    allows_addresses: bool = False  # any that is an IP address, too: a page's name is none
    root_path: str = ""  # that a proxy in front may leave before the path


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
        if self._config.root_path:  # else another ASGI server's own
            scope["root_path"] = self._config.root_path
        error = self._refusal(scope)
        if error is not None:
            record_of(scope).refused(error)
            return await _response(error)(scope, receive, send)
        await self._app(scope, _bounded(receive), send)

    def _refusal(self, scope: Scope) -> HttpError | None:
        headers = dict(scope["headers"])
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        is_named = len(hosts) == 1 or (not hosts and scope["http_version"] == "1.0")
        if not is_named or not all(map(self._is_host_allowed, hosts)):
            text = "the Host header is missing, or names another machine; see --allowed-host"
            return HttpError(400, text)
        if scope["method"] not in _LOOKS and not self._is_own_page(headers):
            return HttpError(403, "a page of another site asks; see --allowed-host")
        if not self._has_key(scope, headers.get(b"authorization", b"")):
            return HttpError(401, "Unauthorized")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MOST_BYTES:
            return _too_large()
        return None

    def _is_own_page(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether no foreign page asks: its browser says where it comes from."""
        origin, allowed = headers.get(b"origin", b""), self._config.allowed_hosts
        if not origin or "*" in allowed:
            return True
        site = origin.partition(b"://")[2]
        return bool(site) and (site == headers.get(b"host") or _name(site) in allowed)

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
        name, allowed = _name(header), self._config.allowed_hosts
        return "*" in allowed or name in allowed or (self._config.allows_addresses and _is_ip(name))


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


def _response(error: HttpError) -> Response:
    """What a refusal looks like: vLLM has words of its own for a missing key."""
    if error.status == 401:
        return JSONResponse({"error": "Unauthorized"}, 401)
    return error.response()


def _name(header: bytes) -> str:
    """The name of a host, without its port."""
    return re.sub(r":\d*$", "", header.decode("latin-1")).lower()


def _is_ip(name: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(name.removeprefix("[").removesuffix("]")))
    return False


def _too_large() -> HttpError:
    return HttpError(413, f"a body has at most {MOST_BYTES} bytes")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
