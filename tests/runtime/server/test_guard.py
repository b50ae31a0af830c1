"""What a request has to pass: keys, the Host header, the size of a body; and its number."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message
from support.unopened_server import asked
from support.web_server import COMPLETIONS, refused

from trt_lora.runtime.server.app import Server
from trt_lora.runtime.server.guard import MOST_BYTES, GuardConfig
from trt_lora.runtime.server.running_server import ServerConfig

KEYS = GuardConfig(api_keys=("one", "two"))
ADMIN = GuardConfig(api_keys=("one",), admin_key="admin")
LOAD = "/v1/load_lora_adapter"
CHANGES = [
    ("POST", LOAD),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/v1/lora_adapters/a/pin"),
    ("POST", "/v1/lora_adapters/org/a/unpin"),
    ("POST", "/adapters"),
    ("DELETE", "/adapters/org/a"),
]
ANSWERS = [
    ("POST", COMPLETIONS),
    ("POST", "/v1/chat/completions"),
    ("POST", "/invocations"),
    ("GET", "/v1/models"),
    ("GET", "/v1/lora_adapters"),
    ("GET", "/v1/lora_adapters/a"),
]
OPEN = [
    *(("GET", path) for path in ("/health", "/ping", "/ready", "/version", "/load", "/metrics")),
    ("GET", "/openapi.json"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]


def status(guard: GuardConfig, method: str, path: str, key: str | None = None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return asked(guard, method, path, headers).status_code


@pytest.mark.parametrize(("method", "path"), [*ANSWERS, *CHANGES])
def test_a_route_needs_one_of_the_keys(method: str, path: str) -> None:
    for key in (None, "", "three", "One", "one ", "one,two", "onetwo"):
        response = asked(KEYS, method, path, {"authorization": f"Bearer {key}"} if key else None)
        assert response.status_code == 401
        assert response.json() == {"error": "Unauthorized"}
    assert {status(KEYS, method, path, key) for key in KEYS.api_keys} <= {400, 404, 503}


def test_a_key_counts_only_as_a_bearers() -> None:
    for header in ("Basic one", "Bearerone", "bearer", "one"):
        assert asked(KEYS, "GET", "/v1/models", {"authorization": header}).status_code == 401
    assert asked(KEYS, "GET", "/v1/models", {"authorization": "bearer one"}).status_code == 503


@pytest.mark.parametrize(("method", "path"), OPEN)
def test_other_routes_need_none(method: str, path: str) -> None:
    assert status(KEYS, method, path) != 401


def test_without_keys_none_is_asked_for() -> None:
    for method, path in (*ANSWERS, *CHANGES):
        assert status(GuardConfig(), method, path) != 401


def test_a_browsers_question_about_methods_needs_no_key() -> None:
    for path in (COMPLETIONS, LOAD):
        assert status(KEYS, "OPTIONS", path) == 405


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_the_key_of_the_admin_is_the_only_one_that_changes_adapters(method: str, path: str) -> None:
    assert status(ADMIN, method, path, "one") == 401
    assert status(ADMIN, method, path) == 401
    assert status(ADMIN, method, path, "admin") in (400, 404, 503)
    assert status(GuardConfig(admin_key="admin"), method, path) == 401


@pytest.mark.parametrize(("method", "path"), ANSWERS)
def test_the_key_of_the_admin_is_for_nothing_else(method: str, path: str) -> None:
    assert status(ADMIN, method, path, "admin") == 401
    assert status(ADMIN, method, path, "one") != 401


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_no_other_spelling_of_a_path_gets_by_without_the_admins_key(method: str, path: str) -> None:
    """Either it is refused, or it is no route."""
    for spelling in (f"{path}%0A", f"{path}/", f"/{path}", path.upper(), path.replace("/", "//")):
        assert status(ADMIN, method, spelling, "one") in (401, 404, 405, 307)
        assert status(ADMIN, method, spelling) in (401, 404, 405)  # //adapters is a host's `/`


def test_a_proxys_prefix_hides_no_path() -> None:
    """Whether the proxy strips it or not."""
    guard = replace(ADMIN, root_path="/api")
    for prefix in ("/api", ""):
        assert status(guard, "POST", f"{prefix}{LOAD}", "one") == 401
        assert status(guard, "POST", f"{prefix}{COMPLETIONS}", "one") == 400  # it has no body
        assert status(guard, "GET", f"{prefix}/version") == 200
    assert status(guard, "GET", "/other/version") == 404


@pytest.mark.parametrize(
    ("headers", "is_allowed"),
    [
        ([], False),
        ([(b"host", b"")], False),
        ([(b"host", b"localhost")], True),
        ([(b"host", b"evil.example"), (b"host", b"localhost")], False),
        ([(b"host", b"localhost"), (b"host", b"localhost")], False),
    ],
)
def test_a_request_of_http_1_1_names_one_machine(
    headers: list[tuple[bytes, bytes]], is_allowed: bool
) -> None:
    app = Server(ServerConfig(Path("nowhere")), GuardConfig(), allows_updates=True).app
    found = list[int]()

    async def send(message: Message) -> None:
        found.append(message.get("status", 0))

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "GET"}
    scope |= {"path": "/version", "query_string": b"", "client": None, "scheme": "http"}

    async def ask() -> None:
        await app({**scope, "headers": headers}, receive, send)

    asyncio.run(ask())
    assert found[0] == (200 if is_allowed else 400)


def test_an_address_is_no_name_of_a_page() -> None:
    """Beyond loopback a Host may be an address that is not known here; a name is another's."""
    guard = GuardConfig(allows_addresses=True)
    for host in ("10.1.2.3:8000", "[fe80::1]:8000", "localhost"):
        assert asked(guard, "GET", "/version", {"host": host}).status_code == 200
    for host in ("evil.example", "10.1.2.3.evil.example", "10.1.2", ""):
        assert asked(guard, "GET", "/version", {"host": host}).status_code == 400


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_a_page_of_another_site_changes_nothing(method: str, path: str) -> None:
    for origin in ("https://evil.example", "null", "localhost", "http://localhost.evil.example"):
        for kind in ({}, {"content-type": "text/plain"}):
            response = asked(GuardConfig(), method, path, {"origin": origin, **kind})
            assert refused(response, 403)["type"] == "Forbidden"
    for origin in ("http://localhost:8000", "http://127.0.0.1"):
        assert asked(GuardConfig(), method, path, {"origin": origin}).status_code != 403
    beyond = GuardConfig(allows_addresses=True)
    for host, status in (("10.1.2.3", 403), ("10.1.2.3:80", 403), ("10.1.2.4:8000", 403)):
        headers = {"host": "10.1.2.3:8000", "origin": f"http://{host}"}
        assert asked(beyond, method, path, headers).status_code == status
    own = {"host": "10.1.2.3:8000", "origin": "http://10.1.2.3:8000"}
    assert asked(beyond, method, path, own).status_code != 403
    anybody = GuardConfig(allowed_hosts=("*",))
    assert asked(anybody, method, path, {"origin": "https://a.example"}).status_code != 403


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        *((host, True) for host in ("localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:80")),
        *((host, True) for host in ("[::1]", "[::1]:8000")),
        *(
            (host, False)
            for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example")
        ),
        *((host, False) for host in ("localhost.", "127.0.0.2", "[::2]:8000", "localhost@evil")),
    ],
)
def test_a_request_names_this_machine(host: str, allowed: bool) -> None:
    response = asked(GuardConfig(), "GET", "/version", {"host": host})
    assert response.status_code == (200 if allowed else 400)
    if not allowed:
        assert "--allowed-host" in refused(response, 400)["message"]


def test_more_hosts_may_be_named_or_all() -> None:
    named = GuardConfig(allowed_hosts=("lora.example",))
    assert asked(named, "GET", "/version", {"host": "lora.example:443"}).status_code == 200
    assert asked(named, "GET", "/version", {"host": "localhost"}).status_code == 400
    every = GuardConfig(allowed_hosts=("*",))
    assert asked(every, "GET", "/version", {"host": "any.example"}).status_code == 200


async def chunks(sizes: Iterable[int]) -> AsyncIterator[bytes]:
    for size in sizes:
        yield b" " * size


@pytest.mark.parametrize("path", [COMPLETIONS, LOAD, "/invocations", "/tokenize"])
def test_a_body_is_refused_as_soon_as_it_is_too_large(path: str) -> None:
    json = {"content-type": "application/json"}

    def told(body: Any) -> dict[str, Any]:
        return refused(asked(GuardConfig(), "POST", path, json, body), 413)

    assert told(b" " * (MOST_BYTES + 1))["message"] == f"a body has at most {MOST_BYTES} bytes"
    halves = MOST_BYTES // 2
    for sizes in ([MOST_BYTES + 1], [halves, halves, 1], [halves] * 1000):
        assert told(chunks(sizes))["type"] == "RequestEntityTooLarge"
    for body in (b" " * MOST_BYTES, chunks([halves, halves])):
        assert asked(GuardConfig(), "POST", path, json, body).status_code == 400  # it is none


def test_a_stated_length_is_refused_before_the_body_comes() -> None:
    headers = {"content-length": str(MOST_BYTES + 1)}
    refused(asked(GuardConfig(), "POST", COMPLETIONS, headers, chunks([])), 413)
