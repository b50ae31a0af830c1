"""A client that is gone holds nothing: no row, no lease, wherever its request was."""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from support.eventually import eventually
from support.served_engines import Gated, MakeGated, hold_submits
from support.web_server import CHATS, COMPLETIONS, posted

from trt_lora.runtime.server import app
from trt_lora.runtime.server.engine_process.engine_client import Answers, EngineClient

PROMPT = [1, 2, 3]


def connection(gated: Gated, path: str, **body: Any) -> socket.socket:
    """A connection on which a request was sent."""
    content = json.dumps({"prompt": PROMPT, "max_tokens": 20, "temperature": 0, **body})
    made = socket.create_connection(gated.web.address, timeout=60)
    made.sendall(posted(path, content))
    return made


def holds_nothing(gated: Gated) -> bool:
    """Whether no request is known, and no adapter is leased."""
    running = gated.web.running
    leases = [known["leases"] for known in gated.web.client.get("/v1/lora_adapters").json()["data"]]
    return len(running.client) == 0 and running.admission.requests == 0 and not any(leases)


def while_it_waits(gated: Gated, made: socket.socket) -> None:
    """No step was made."""
    assert eventually(lambda: gated.engine.waits)


def while_it_streams(gated: Gated, made: socket.socket) -> None:
    """Some tokens have come."""
    gated.engine.let(4)
    while b"data: " not in made.recv(1 << 16):
        pass
    assert eventually(lambda: gated.engine.waits)


@pytest.mark.parametrize("model", ["base", "1"])
@pytest.mark.parametrize(
    ("stream", "when"),
    [(False, while_it_waits), (True, while_it_waits), (True, while_it_streams)],
)
def test_a_row_and_a_lease_are_free_one_step_after_the_client_is_gone(
    make_gated: MakeGated,
    stream: bool,
    when: Callable[[Gated, socket.socket], None],
    model: str,
) -> None:
    gated = make_gated()
    gated.engine.shut()
    made = connection(gated, COMPLETIONS, stream=stream, model=model)
    when(gated, made)
    made.close()
    assert eventually(lambda: len(gated.web.running.client) == 0)  # before any step
    steps = gated.engine.steps
    gated.engine.let(1)
    assert eventually(lambda: holds_nothing(gated))
    assert gated.engine.steps <= steps + 1
    gated.engine.let()
    assert gated.web.answer(COMPLETIONS, prompt=PROMPT, model=model)["choices"]


def test_all_answers_of_a_client_go_with_it(make_gated: MakeGated) -> None:
    gated = make_gated(rows=2)
    gated.engine.shut()
    made = connection(gated, COMPLETIONS, n=8, temperature=1, model="1", stream=True)
    while_it_waits(gated, made)
    assert eventually(lambda: len(gated.web.running.client) == 8)
    made.close()
    gated.engine.let()
    assert eventually(lambda: holds_nothing(gated))


def test_a_client_that_is_gone_before_the_engine_has_its_request_holds_nothing(
    make_gated: MakeGated, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated, comes = make_gated(), hold_submits(monkeypatch)
    gated.engine.shut()
    made = connection(gated, COMPLETIONS, n=3, temperature=1, model="1")
    assert eventually(lambda: gated.web.running.admission.requests == 3)
    made.close()
    assert eventually(lambda: gated.web.running.admission.requests == 0)
    comes.set()
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 2}
    with gated.web.client.stream("POST", COMPLETIONS, json=body):  # which is submitted after it
        assert len(gated.web.running.client) == 1
        gated.engine.let()
    assert eventually(lambda: holds_nothing(gated))


def test_a_client_that_is_gone_before_its_body_is_whole_has_asked_for_nothing(
    make_gated: MakeGated,
) -> None:
    gated = make_gated()
    with socket.create_connection(gated.web.address) as made:
        made.sendall(posted(CHATS, "{", length=99))
    assert gated.web.answer(COMPLETIONS, prompt=PROMPT)["choices"]
    assert holds_nothing(gated)


def test_a_client_that_reads_nothing_holds_up_no_step_of_others(make_gated: MakeGated) -> None:
    gated = make_gated(rows=2)
    made = connection(gated, COMPLETIONS, stream=True, max_tokens=20, n=1)
    for _ in range(5):
        assert gated.web.answer(COMPLETIONS, prompt=PROMPT, max_tokens=4)["choices"]
    made.close()
    assert eventually(lambda: holds_nothing(gated))


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("method", [(EngineClient, "submit"), (Answers, "take")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_as_something_comes_holds_nothing(
    make_gated: MakeGated,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
    method: tuple[type, str],
    turns: int,
) -> None:
    """The server notices it so many turns of its event loop before who waits does."""
    original, leaves = getattr(*method), list[asyncio.Event]()

    async def comes(*args: Any, **options: Any) -> Any:
        found = await original(*args, **options)
        leaves[0].set()
        for _ in range(turns):
            await asyncio.sleep(0)
        return found

    async def gone(request: Request) -> None:
        del request
        leaves.append(asyncio.Event())
        await leaves[0].wait()

    gated = make_gated()
    if method[1] == "submit":
        gated.engine.shut()
    monkeypatch.setattr(*method, comes)
    monkeypatch.setattr(app, "_disconnect", gone)
    made = connection(gated, COMPLETIONS, stream=stream)
    assert eventually(lambda: leaves and leaves[0].is_set())
    made.close()
    gated.engine.let()
    assert eventually(lambda: holds_nothing(gated))
