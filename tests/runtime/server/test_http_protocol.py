"""Connections whose client is slow, or says nothing at all."""

import socket
from contextlib import suppress

import pytest
from support.served_engines import MakeGated, Spoken
from support.web_server import COMPLETIONS, Web, posted, web_server

from trt_lora.runtime.server import http_protocol, json_body

SOON = 0.3
TOO_LARGE = "431 Request Header Fields Too Large"
POST = (
    f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
).encode()


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


@pytest.mark.parametrize("more", [b"G", b"\r\n", b"GET /health HTTP/1.1\r\nX:"])
def test_the_headers_of_later_requests_have_no_longer(
    spoken: Spoken, monkeypatch: pytest.MonkeyPatch, more: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "_TIMEOUT_S", SOON)
    with web_server(spoken.config()) as web, socket.create_connection(web.address) as made:
        made.settimeout(60)
        for _ in range(2):
            made.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert made.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
        made.sendall(more)
        assert made.recv(1 << 16).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert made.recv(1) == b""


def test_a_next_request_that_begins_early_ends_no_answer(
    make_gated: MakeGated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_TIMEOUT_S", SOON)
    gated = make_gated()
    with socket.create_connection(gated.web.address) as made:
        gated.engine.shut()
        made.sendall(posted(COMPLETIONS, '{"prompt": [5], "max_tokens": 1}') + b"GET")
        made.settimeout(4 * SOON)
        with pytest.raises(TimeoutError):
            made.recv(1)
        gated.engine.let()
        made.settimeout(60)
        assert made.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_body_that_is_refused_by_its_length_ends_the_connection(web: Web) -> None:
    found = answer_to(web, POST + b"Content-Length: 5000000\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close\r\n" in found


@pytest.mark.parametrize("line", [b"X: " + b"y" * 1000, b"X: y\r\n"], ids=["long", "many"])
def test_a_header_that_is_too_large_ends_the_connection(web: Web, line: bytes) -> None:
    """A stream of a megabyte, of one line or of many."""
    with socket.create_connection(web.address, timeout=60) as made:
        made.sendall(POST)
        with suppress(ConnectionError):
            for _ in range(1_000_000 // len(line)):
                made.sendall(line if line.endswith(b"\n") else line[3:])
        found = b""
        with suppress(ConnectionError):
            found = made.recv(1 << 16)
    assert found in (b"", http_protocol._REFUSAL.format(TOO_LARGE).encode())
    assert web.client.get("/health").status_code == 200


def test_a_large_body_behind_a_small_header_is_read(web: Web) -> None:
    assert web.answer(COMPLETIONS, prompt=[5], max_tokens=1, user="x" * 200_000)["choices"]


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
