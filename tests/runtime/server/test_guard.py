"""What a request has to pass: keys, the Host header, the size of a body; and its number."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
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
    async def ask(path: str) -> int:
        app = Server(ServerConfig(Path("nowhere")), ADMIN, allows_updates=True).app
        transport = httpx.ASGITransport(app, root_path="/api")
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"authorization": "Bearer one"}
            return (await client.post(f"/api{path}", headers=headers)).status_code

    assert asyncio.run(ask(LOAD)) == 401
    assert asyncio.run(ask(COMPLETIONS)) == 400  # it has no body


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
    def told(body: Any) -> dict[str, Any]:
        return refused(asked(GuardConfig(), "POST", path, None, body), 413)

    assert told(b" " * (MOST_BYTES + 1))["message"] == f"a body has at most {MOST_BYTES} bytes"
    halves = MOST_BYTES // 2
    for sizes in ([MOST_BYTES + 1], [halves, halves, 1], [halves] * 1000):
        assert told(chunks(sizes))["type"] == "RequestEntityTooLarge"
    for body in (b" " * MOST_BYTES, chunks([halves, halves])):
        assert asked(GuardConfig(), "POST", path, None, body).status_code == 400  # it is no JSON


def test_a_stated_length_is_refused_before_the_body_comes() -> None:
    headers = {"content-length": str(MOST_BYTES + 1)}
    refused(asked(GuardConfig(), "POST", COMPLETIONS, headers, chunks([])), 413)
