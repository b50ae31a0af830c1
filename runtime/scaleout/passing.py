"""Requests on their way from a client to a replica, and the messages on their way back."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from trt_lora.runtime.scaleout.residency import Wish
from trt_lora.runtime.server.answers.bodies import AnswerBody
from trt_lora.runtime.server.answers.replies import DONE
from trt_lora.runtime.server.errors import HttpError
from trt_lora.runtime.server.guard import MOST_BYTES
from trt_lora.runtime.server.json_values import decoded

# Of a scope; what else there is belongs to the server that has made it.
SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("headers", "client", "server"),
)


class Inbox:
    """The ASGI messages of one answer, as they come."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._messages = asyncio.Queue[Message | HttpError]()

    def put(self, message: Message | HttpError) -> None:
        """Take a message, or the error that is the last one."""
        self._messages.put_nowait(message)

    async def empty(self, send: Send) -> None:
        """Send all messages, until the last one."""
        has_begun = False
        while True:
            message = await self._messages.get()
            if isinstance(message, HttpError):
                return await _fail(message, send, has_begun=has_begun)
            await send(message)
            if has_begun and not message.get("more_body"):
                return None
            has_begun = True


class Passed(Response):
    """A response that comes from elsewhere."""

    def __init__(self, pass_on: Callable[[Send], Awaitable[None]]) -> None:
        """Take what sends its messages."""
        super().__init__()
        self._pass_on = pass_on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        del scope, receive
        await self._pass_on(send)


async def whole_body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        HttpError: 413; it is larger than a replica would take.
    """
    parts, taken = list[bytes](), 0
    async for part in request.stream():
        parts.append(part)
        taken += len(part)
        if taken > MOST_BYTES:
            raise HttpError(413, f"a body has at most {MOST_BYTES} bytes")
    return b"".join(parts)


def wish_of(scope: Scope, body: bytes, base: str) -> Wish:
    """Return which adapters a request names; what cannot be read is for a replica to refuse.

    Args:
        scope: of the request.
        body: of the request.
        base: the name of the base model.
    """
    if scope["method"] != "POST":
        return Wish()
    try:
        asked = decoded(body, AnswerBody)
        names = {asked.model, *asked.named_adapters(), *(part.name for part in asked.parts())}
    except HttpError:
        return Wish()
    own = {(name or base).removeprefix(f"{base}:") for name in names}
    return Wish(tuple(sorted(own - {base})))


async def _fail(error: HttpError, send: Send, *, has_begun: bool) -> None:
    """Say what has gone wrong: as an event, where a stream has begun."""
    response = error.response()
    body = b"data: " + error.body() + b"\n\n" + DONE if has_begun else error.body()
    if not has_begun:
        start = {"type": "http.response.start", "status": error.status}
        await send({**start, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
