"""A server of HTTP at a port of its own, in a thread, and a client of it."""

import json
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from support.eventually import eventually

from trt_lora.runtime.server.app import Server
from trt_lora.runtime.server.draining_server import DrainingServer, WebConfig
from trt_lora.runtime.server.guard import GuardConfig
from trt_lora.runtime.server.http_protocol import TimedHttp
from trt_lora.runtime.server.running_server import RunningServer, ServerConfig
from trt_lora.runtime.server.telemetry.request_log import RequestLogConfig

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def posted(path: str, content: str, *headers: str, length: int | None = None) -> bytes:
    """A request with a body of JSON, or with its beginning where it says to be longer."""
    size = len(content) if length is None else length
    head = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    return "\r\n".join((*head, *headers, f"Content-Length: {size}", "", content)).encode()


@dataclass
class Web:
    """A server that runs."""

    server: Server
    draining: DrainingServer
    address: tuple[str, int]
    client: httpx.Client

    @property
    def running(self) -> RunningServer:
        """What the application has opened."""
        assert self.server.running is not None
        return self.server.running

    @property
    def load(self) -> int:
        """How many requests are under way."""
        return int(self.client.get("/load").json()["server_load"])

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Return the response to a body of JSON."""
        return self.client.post(path, json=body)

    def answer(self, path: str, **body: Any) -> Any:
        """Return the body of a response that is none of an error."""
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, **body: Any) -> list[Any]:
        """Return the events of a stream, which ends as it should."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            text = response.read().decode()
        *events, done, end = text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def refusal(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """Return the error that a body gets, which has the shape and the status it should."""
        return refused(self.post(path, **body), status)


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error of a response, of the shape that it should have."""
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    found: dict[str, Any] = error
    return found


class _Failures(logging.Handler):
    """What a server has logged as its own fault."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@contextmanager
def web_server(
    config: ServerConfig,
    guard: GuardConfig | None = None,
    *,
    allows_updates: bool = True,
    web: WebConfig | None = None,
    requests: RequestLogConfig | None = None,
    failures: Sequence[str] = (),
) -> Iterator[Web]:
    """Serve, and end; no handler may have failed, unless with a log that has all of `failures`."""
    server = Server(config, guard or GuardConfig(), requests, allows_updates=allows_updates)
    draining = DrainingServer(
        uvicorn.Config(server.app, http=TimedHttp, log_config=None, timeout_graceful_shutdown=3),
        server,
        web or WebConfig(),
    )
    errors: list[BaseException] = []

    def run(listener: socket.socket) -> None:
        try:
            draining.run([listener])
        except BaseException as error:
            errors.append(error)

    logs = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")]
    handler = _Failures()
    for log in logs:
        log.addHandler(handler)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        thread = threading.Thread(target=run, args=(listener,), name="web")
        thread.start()
        try:
            assert eventually(lambda: draining.started or errors)
            if errors:
                raise errors[0]
            url = f"http://{address[0]}:{address[1]}"
            with httpx.Client(base_url=url, timeout=60) as client:
                yield Web(server, draining, address, client)
        finally:
            draining.should_exit = True
            thread.join()
            for log in logs:
                log.removeHandler(handler)
    assert len(handler.found) == len(failures), handler.found
    assert all(text in found for text, found in zip(failures, handler.found, strict=True))
