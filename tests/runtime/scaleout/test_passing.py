"""Requests on their way to a replica, and messages on their way back."""

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from trt_lora.runtime.scaleout.passing import Inbox, whole_body, wish_of
from trt_lora.runtime.server.errors import HttpError
from trt_lora.runtime.server.guard import MOST_BYTES

START = {"type": "http.response.start", "status": 200, "headers": []}


def part(text: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


def sent(*messages: Message | HttpError) -> list[Message]:
    """What a client gets."""

    async def run() -> list[Message]:
        inbox, found = Inbox(), list[Message]()

        async def send(message: Message) -> None:
            found.append(message)

        for message in messages:
            inbox.put(message)
        await asyncio.wait_for(inbox.empty(send), 5)
        return found

    return asyncio.run(run())


def test_messages_pass_as_they_are_until_the_last() -> None:
    whole = [START, part(b"a"), part(b"b"), part(b"", more=False)]
    assert sent(*whole, part(b"behind")) == whole


def test_an_error_before_the_start_is_a_response_and_one_behind_it_an_event() -> None:
    error = HttpError(503, "gone", retry_after_s=1)
    start, body = sent(error)
    assert start["status"] == 503
    assert (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"]["message"] == "gone"
    *begun, last = sent(START, part(b"a"), error)
    assert begun == [START, part(b"a")]
    event, done, end = last["body"].split(b"\n\n")
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == 503
    assert (done, end, last["more_body"]) == (b"data: [DONE]", b"", False)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model": "base"}, ()),
        ({}, ()),
        ({"model": "a"}, ("a",)),
        ({"model": "base:a"}, ("a",)),
        ({"model": "base", "lora": [{"name": "b"}, {"name": "a", "scale": 0.5}]}, ("a", "b")),
        ({"lora": {"name": "a", "scale": 0.5}}, ("a",)),
        ({"model": "base", "lora_path": "a"}, ("a",)),
        ({"model": "base", "lora_request": {"lora_name": "a"}}, ("a",)),
        ({"model": 1}, ()),
    ],
)
def test_a_body_names_adapters(body: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert wish_of({"method": "POST"}, json.dumps(body).encode(), "base").adapters == expected


def test_what_has_no_body_names_none() -> None:
    assert wish_of({"method": "GET"}, b"", "base").adapters == ()
    assert wish_of({"method": "POST"}, b"\xff", "base").adapters == ()


def test_a_body_is_bounded() -> None:
    async def run(size: int) -> int:
        parts = [b"x" * (size // 2), b"x" * (size - size // 2)]

        async def receive() -> Message:
            text = parts.pop(0)
            return {"type": "http.request", "body": text, "more_body": bool(parts)}

        return len(await whole_body(Request({"type": "http", "headers": []}, receive)))

    assert asyncio.run(run(MOST_BYTES)) == MOST_BYTES
    with pytest.raises(HttpError, match="at most"):
        asyncio.run(run(MOST_BYTES + 1))
