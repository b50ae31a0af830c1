"""A replica answers requests that come as scopes, and does what all replicas are asked."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Message, Scope
from support.served_engines import Spoken

from trt_lora.plugins.errors import BackendError
from trt_lora.runtime.manifest import read_manifest
from trt_lora.runtime.scaleout.replica import Replica
from trt_lora.runtime.scaleout.residency import Wish
from trt_lora.runtime.server.app import Server
from trt_lora.runtime.server.guard import GuardConfig

COMPLETIONS, LOAD = "/v1/completions", "/v1/load_lora_adapter"
WISH = Wish(replica="me")


def scope_of(method: str, path: str) -> Scope:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    fixed = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
    place = {"path": path, "raw_path": path.encode(), "query_string": b"", "client": ("x", 1)}
    return {**fixed, **place, "method": method, "headers": headers}


@asynccontextmanager
async def opened(spoken: Spoken, **fields: Any) -> AsyncIterator[Replica]:
    server = Server(spoken.config(**fields), GuardConfig(), allows_updates=True)
    replica = Replica()
    await replica.open(server, "me")
    try:
        yield replica
    finally:
        assert server.running is not None
        await server.running.close()


def run(spoken: Spoken, test: Callable[[Replica], Awaitable[Any]], **fields: Any) -> Any:
    async def running() -> Any:
        async with opened(spoken, **fields) as replica:
            return await asyncio.wait_for(test(replica), 60)

    return asyncio.run(running())


async def asked(replica: Replica, path: str, **body: Any) -> Any:
    name = body.get("lora_name")
    return await replica.whole(scope_of("POST", path), json.dumps(body).encode(), name)


def test_the_first_request_of_an_ingress_asks_to_be_listened_to(spoken: Spoken) -> None:
    async def test(replica: Replica) -> None:
        scope, body = scope_of("GET", "/health"), b""
        assert await replica.http(Wish(), "there", 1, scope, body) == "me"
        assert await replica.http(WISH, "there", 2, scope, body) == ""
        assert await replica.http(Wish(), "there", 3, scope, body) == ""
        (batch,) = [batch async for batch in replica.events(WISH, "there")]
        assert [(n, m.get("status")) for n, m in batch] == [
            (2, 200),
            (2, None),
            (3, 200),
            (3, None),
        ]
        assert await replica.http(Wish(), "there", 4, scope, body) == "me"  # the stream has ended

    run(spoken, test)


def test_tokens_of_a_step_leave_in_one_batch(spoken: Spoken) -> None:
    rows, tokens = 2, 16

    async def test(replica: Replica) -> list[list[tuple[int, Message]]]:
        given = {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True}
        body, scope = json.dumps(given).encode(), scope_of("POST", COMPLETIONS)
        calls = [
            asyncio.create_task(replica.http(WISH, "there", number, scope, body))
            for number in range(rows)
        ]
        found = [batch async for batch in replica.events(WISH, "there")]
        await asyncio.gather(*calls)
        return found

    batches = [
        {number for number, message in batch if message.get("body")} for batch in run(spoken, test)
    ]
    both = [numbers for numbers in batches if len(numbers) == rows]
    # How many depends on when they join; that a batch is a whole step is Outbox's own test.
    assert both


def test_a_request_that_is_cancelled_frees_its_row(spoken: Spoken) -> None:
    async def test(replica: Replica) -> None:
        given = {"prompt": [1], "max_tokens": 30, "ignore_eos": True, "stream": True}
        scope = scope_of("POST", COMPLETIONS)
        call = asyncio.create_task(
            replica.http(WISH, "there", 1, scope, json.dumps(given).encode())
        )
        stream = replica.events(WISH, "there")
        await anext(stream)
        assert (await replica.record_routing_stats())["queue"] == 1
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert (await replica.record_routing_stats())["queue"] == 0

    run(spoken, test)


def test_it_says_what_lies_in_slots(spoken: Spoken) -> None:
    async def test(replica: Replica) -> dict[str, Any]:
        for name, path in spoken.adapters.items():
            assert (await asked(replica, LOAD, lora_name=name, lora_path=str(path))).status == 200
        done = await asked(replica, COMPLETIONS, model="a", prompt=[1, 2], max_tokens=1)
        assert done.status == 200
        return await replica.record_routing_stats()

    stats, rows = run(spoken, test), read_manifest(spoken.engine).max_batch_size
    assert stats["slots"] == 2
    assert (stats["wanted"], stats["queue"], stats["rows"]) == ([], 0, rows)
    ((name, (version, content)),) = stats["resident"].items()
    assert (name, version, len(content)) == ("a", 1, 64)


def test_what_is_undone_was_not_there_or_is_again_what_it_was(spoken: Spoken) -> None:
    async def test(replica: Replica) -> None:
        first, second = map(str, spoken.adapters.values())
        made = await asked(replica, LOAD, lora_name="n", lora_path=first)
        assert (made.replica, made.is_taken, made.path) == ("me", True, None)
        await replica.undo("n", {"another": None})
        assert await replica.loaded() == {"n": first}
        replaced = await asked(replica, LOAD, lora_name="n", lora_path=second, load_inplace=True)
        assert replaced.path == first
        await replica.undo("n", {"me": replaced.path})
        assert await replica.loaded() == {"n": first}
        await replica.undo("n", {"me": made.path})
        assert await replica.loaded() == {}

    run(spoken, test)


def test_what_others_have_is_loaded_and_what_cannot_be_is_told(
    spoken: Spoken, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(replica: Replica) -> None:
        a, b = map(str, spoken.adapters.values())
        await replica.load({"a": a})
        await replica.load({"a": b, "b": b, "c": "/nowhere"})
        assert await replica.loaded() == {"a": a, "b": b}

    run(spoken, test)
    assert "c, which another replica has, is not loaded" in caplog.text


def test_what_a_folder_offers_is_nothing_that_others_have_to_load(spoken: Spoken) -> None:
    async def test(replica: Replica) -> Any:
        return await replica.loaded()

    assert run(spoken, test, lora_dir=spoken.root) == {}


def test_a_replica_whose_engine_is_gone_is_not_healthy(spoken: Spoken) -> None:
    async def test(replica: Replica) -> None:
        await replica.check_health()
        replica._client.abandon()
        await asyncio.wait({replica._client.dead})
        with pytest.raises(BackendError, match="gone"):
            await replica.check_health()

    run(spoken, test)
