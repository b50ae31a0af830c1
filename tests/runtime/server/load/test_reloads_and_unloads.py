"""Adapters replaced and unloaded under load: nothing stale, nothing reused, nothing left."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.adapter_routes import KNOWN, LOAD, UNLOAD, loaded
from support.eventually import eventually
from support.load.inside import Inside, inside
from support.load.memory import most_growth, resident
from support.load.said import ASKED, Said, said_alone, said_over_http
from support.served_engines import Spoken, write_adapter
from support.served_process import started
from support.web_server import COMPLETIONS, Web, posted, web_server

from trt_lora.runtime import open_engine
from trt_lora.runtime.manifest import Manifest

RELOADS, WARM, LOOK = 1000, 100, 10  # how many; those before memory is measured; asked after each
MOST_GROWTH = 0.01  # of the memory, in one of so many thousands
THOUSANDS = 3
MOST_S = 5.0  # that an unload takes beside 16 streams
PROMPT = [*range(5, 25)]  # long enough for its prefix to be kept
BODY = {"prompt": PROMPT, "return_token_ids": True, **ASKED}


@pytest.fixture
def opened() -> Iterator[Inside]:
    with inside() as found:
        yield found


@pytest.fixture
def variants(manifest: Manifest, place: Path) -> list[Path]:
    """Adapters of one size that answer differently."""
    return [write_adapter(place / f"v{n}", manifest, rank=8, seed=n) for n in range(3)]


def alone(spoken: Spoken, variants: list[Path]) -> list[Said]:
    """What each of them answers by itself."""
    with open_engine(spoken.engine, "onnxruntime") as engine:
        for path in variants:
            engine.adapters.load(path.name, path)
        found = [said_alone(engine, PROMPT, {path.name: 1.0}) for path in variants]
    assert not any(one.is_one_of([*found[:at], *found[at + 1 :]]) for at, one in enumerate(found))
    return found


def said(client: httpx.Client, model: str) -> Said:
    response = client.post(COMPLETIONS, json={**BODY, "model": model})
    assert response.status_code == 200, response.text
    return said_over_http(response.json())


@contextmanager
def load_on(url: httpx.URL, model: str, answers: list[Said]) -> Iterator[None]:
    """Ask a model without a pause, each time for one of these answers."""
    is_over, errors = threading.Event(), list[BaseException]()

    def ask() -> None:
        try:
            with httpx.Client(base_url=url, timeout=60) as client:
                while not is_over.is_set():
                    assert said(client, model).is_one_of(answers)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert not errors, errors


def growth(turn: Callable[[int], None], processes: list[int]) -> float:
    """By which part of its memory a process grows in so many reloads, the one that grows most."""
    before = resident(processes)
    for number in range(RELOADS):
        turn(number)
    return most_growth(before, resident(processes))


@pytest.mark.slow
def test_a_thousand_hot_reloads_leave_nothing_behind_and_no_answer_is_stale(
    spoken: Spoken, variants: list[Path]
) -> None:
    expected, words = alone(spoken, variants), ("--allow-runtime-lora-updating", "--lora-root")
    with started(spoken.engine, *words, spoken.root) as server:
        assert eventually(server.is_ready)
        client, processes = server.client, [server.process.pid, server.engine]

        def turn(number: int) -> None:
            path = str(variants[number % len(variants)])
            body = {"lora_name": "x", "lora_path": path, "load_inplace": True}
            assert client.post(LOAD, json=body).status_code == 200
            if number % LOOK == 0:
                assert said(client, "x").is_one_of([expected[number % len(variants)]])

        turn(0)
        with load_on(client.base_url, "x", expected):
            for number in range(WARM):
                turn(number)
            # What leaks grows with every thousand; an allocator's arenas grow with the first.
            assert any(growth(turn, processes) < MOST_GROWTH for _ in range(THOUSANDS))
        (known,) = client.get(KNOWN).json()["data"]
        assert (known["version"] - WARM - 1) % RELOADS == 0
        assert known["leases"] == 0


@pytest.mark.parametrize("models", [["x"], ["x", "a"]], ids=["its own", "another's too"])
def test_an_unload_beside_streams_and_cancels_is_quick_and_frees_exactly_its_bytes(
    spoken: Spoken, variants: list[Path], opened: Inside, models: list[str]
) -> None:
    modules = [(name, str(path)) for name, path in spoken.adapters.items()]
    with web_server(spoken.config(lora_modules=modules)) as web, ExitStack() as stack:
        nbytes = loaded(web, "x", variants[0])["bytes"]
        before = opened.adapters.stats.memory_bytes
        streams = [stack.enter_context(stream(web, model)) for model in models for _ in range(3)]
        for each in streams[::2]:
            each.close()
        start = time.monotonic()
        response = web.client.post(
            UNLOAD, json={"lora_name": "x", "wait": True}, headers={"accept": "application/json"}
        )
        assert time.monotonic() - start < MOST_S
        assert response.json()["bytes_freed"] == nbytes
        assert opened.adapters.stats.memory_bytes == before - nbytes
        assert web.client.get(f"{KNOWN}/x").status_code == 404
        for each in streams[1::2]:
            while each.recv(1 << 16):
                pass
        assert eventually(lambda: len(web.running.client) == 0)
        opened.check_integrity()


@contextmanager
def stream(web: Web, model: str) -> Iterator[socket.socket]:
    """A stream of 16 answers that has begun."""
    fields: dict[str, Any] = {**BODY, "model": model, "n": 16, "temperature": 1, "max_tokens": 30}
    body = json.dumps({**fields, "stream": True})
    with socket.create_connection(web.address, timeout=60) as made:
        made.sendall(posted(COMPLETIONS, body, "Connection: close"))
        while b"data: " not in (data := made.recv(1 << 16)):
            assert data
            assert b" 200 OK" in data, data
        yield made
