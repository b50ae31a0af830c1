"""Connections whose client is slow, or says nothing at all."""

import socket

import pytest
from support.served_engines import Spoken
from support.web_server import COMPLETIONS, Web, web_server

from trt_lora.runtime.server import http_protocol, json_body

SOON = 0.3
POST = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n".encode()


def answer_to(web: Web, sent: bytes) -> bytes:
    """What a connection gets that sends no more than this, until it is closed."""
    with socket.create_connection(web.address, timeout=60) as made:
        made.sendall(sent)
        found = b""
        while b"\r\n\r\n" not in found and (data := made.recv(1 << 16)):
            found += data
        if b"connection: close" in found:
            assert made.recv(1) == b""
    return found


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST", POST, POST + b"Content-Length: 9\r\nX: " + b"y" * 1000],
    ids=["nothing", "a word", "no end", "a long header"],
)
def test_headers_that_do_not_come_in_time_are_waited_for_no_longer(
    spoken: Spoken, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "_TIMEOUT_S", SOON)
    with web_server(spoken.config()) as web:
        found = answer_to(web, sent)
        assert found.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"connection: close\r\n" in found
        assert web.client.get("/health").status_code == 200


def test_a_body_that_does_not_come_in_time_is_waited_for_no_longer(
    spoken: Spoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_body, "_TIMEOUT_S", SOON)
    with web_server(spoken.config()) as web:
        for rest in (
            b'Content-Length: 99\r\n\r\n{"prompt": ',
            b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\n',
        ):
            assert answer_to(web, POST + rest).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert web.answer(COMPLETIONS, prompt=[5], max_tokens=1)["choices"]
        assert web.load == 0


def test_a_request_that_takes_longer_than_its_headers_may_is_answered(
    spoken: Spoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is that of the headers alone; a connection may have more requests."""
    monkeypatch.setattr(http_protocol, "_TIMEOUT_S", SOON)
    body = b'{"prompt": [5], "max_tokens": 1}'
    with web_server(spoken.config()) as web, socket.create_connection(web.address) as made:
        for _ in range(2):
            made.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body[:5])
            made.settimeout(2 * SOON)
            with pytest.raises(TimeoutError):
                made.recv(1)
            made.settimeout(60)
            made.sendall(body[5:])
            assert made.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")


def test_connections_that_say_nothing_keep_nobody_from_an_answer(web: Web) -> None:
    silent = [socket.create_connection(web.address) for _ in range(200)]
    try:
        assert web.answer(COMPLETIONS, prompt=[5], max_tokens=1)["choices"]
    finally:
        for made in silent:
            made.close()
