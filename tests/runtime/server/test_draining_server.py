"""How a server ends: no answer is lost that has time, and a balancer knows before clients do."""

import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.eventually import eventually
from support.fakes.slot_engine import number_file
from support.served_engines import Gated, MakeGated
from support.web_server import COMPLETIONS, Web

from trt_lora.runtime.server.draining_server import WebConfig, notify

BODY = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@contextmanager
def under_way(gated: Gated) -> Iterator[Future[list[Any]]]:
    """A stream whose next step is at the gate."""
    gated.engine.shut()
    with ThreadPoolExecutor() as pool:
        try:
            stream = pool.submit(gated.web.events, COMPLETIONS, **BODY)
            assert eventually(lambda: gated.engine.waits)
            yield stream
        finally:
            gated.engine.let()


def refuses(web: Web) -> bool:
    """Whether a request is refused because the server ends."""
    try:
        response = web.post(COMPLETIONS, prompt=[1], max_tokens=1)
    except httpx.TransportError:
        return False
    return response.status_code == 503 and "is ending" in response.text


def test_what_runs_ends_whole_and_new_requests_are_refused_after_the_grace(
    make_gated: MakeGated,
) -> None:
    gated = make_gated(web=WebConfig(drain_grace_s=0.5))
    web = gated.web
    assert web.client.get("/ready").status_code == 200
    with under_way(gated) as stream, ThreadPoolExecutor() as pool:
        web.draining.handle_exit(signal.SIGTERM, None)
        assert web.client.get("/ready").status_code == 503
        assert web.client.get("/health").status_code == 200
        late = pool.submit(web.post, COMPLETIONS, **BODY)  # within the grace
        assert eventually(lambda: web.load == 2)
        assert eventually(lambda: web.running.admission.refuses)
        assert refuses(web)
        gated.engine.let()
        assert stream.result()[-1]["choices"][0]["finish_reason"] == "length"
        assert late.result().status_code == 200
    assert eventually(lambda: web.draining.should_exit)
    assert web.draining.exit_status == 0


def test_what_does_not_end_in_time_is_told_so(make_gated: MakeGated) -> None:
    gated = make_gated(web=WebConfig(drain_grace_s=0, shutdown_timeout_s=0.2))
    with under_way(gated) as stream:
        gated.web.draining.handle_exit(signal.SIGTERM, None)
        (event,) = stream.result()
        assert event["error"]["code"] == 503
        assert "ends" in event["error"]["message"]


def test_an_interrupt_leaves_the_grace_out(make_gated: MakeGated) -> None:
    gated = make_gated(web=WebConfig(drain_grace_s=600))
    gated.web.draining.handle_exit(signal.SIGINT, None)
    assert eventually(lambda: gated.web.draining.should_exit)


def test_a_second_signal_ends_at_once(make_gated: MakeGated) -> None:
    gated = make_gated(web=WebConfig(drain_grace_s=600))
    gated.web.draining.handle_exit(signal.SIGTERM, None)
    assert not gated.web.draining.should_exit
    gated.web.draining.handle_exit(signal.SIGTERM, None)
    assert gated.web.draining.should_exit
    assert gated.web.draining.force_exit
    gated.web.draining.force_exit = False  # the test ends it in peace


def test_an_engine_that_is_gone_ends_every_answer_and_the_server(
    make_gated: MakeGated, tmp_path: Path
) -> None:
    gated = make_gated(web=WebConfig(drain_grace_s=600))
    with under_way(gated) as stream, ThreadPoolExecutor() as pool:
        whole = pool.submit(gated.web.post, COMPLETIONS, **BODY)
        assert eventually(lambda: gated.web.load == 2)
        loop = gated.web.draining.servers[0].get_loop()
        loop.call_soon_threadsafe(gated.web.running.client.abandon)
        (event,) = stream.result()
        assert event["error"]["code"] == 503
        assert whole.result().status_code == 503
        assert gated.web.client.get("/health").status_code == 503
        body = {"lora_name": "x", "lora_path": str(number_file(tmp_path, 4))}
        assert gated.web.refusal("/v1/load_lora_adapter", 503, **body)
    assert eventually(lambda: gated.web.draining.should_exit)
    assert gated.web.draining.exit_status == 70


def test_a_supervisor_is_told_by_datagram(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = str(tmp_path_factory.mktemp("n") / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(path)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        notify("READY=1")
        assert supervisor.recv(100) == b"READY=1"
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("READY=1")  # nobody asks
