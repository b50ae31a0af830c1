"""HttpError: what a request is refused with, as vLLM 0.33 words its bodies."""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from starlette.responses import Response

GONE = 499  # nginx's status of a client that has left before its response began
_MOST = 200  # characters of a value that a message repeats
# What a message may repeat of a request: what stands in quotes, or has no blank in it.
# Where a message ends first, so does what is in quotes; an apostrophe inside of a word is none.
_REPEATED = re.compile(
    r"""(?<!\w)'(?:[^'\\]|\\.)*(?:'|\Z)|"(?:[^"\\]|\\.)*(?:"|\Z)|`[^`]*(?:`|\Z)|[^\s'"`]+""",
    re.DOTALL,
)
_QUOTES = "'\"`"
_UNREAD = (408, 413)  # there is more to come, which nobody reads
# A folder's name may have blanks, and its slash behind it tells; the last name ends at one.
_NAME = r"[^\s/:;,'\"]+"
_PATH = re.compile(rf"(?<![\w/])/(?:{_NAME}(?: +{_NAME})*/)+(?:{_NAME})?")
_TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    404: "NotFoundError",
    409: "ConflictError",
    GONE: "ClientClosedRequest",
    422: "UnprocessableEntityError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class HttpError(Exception):
    """A status with vLLM's body: `{"error": {"message", "type", "param", "code"}}`."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        kind: str | None = None,
        *,
        retry_after_s: int | None = None,
    ) -> None:
        """Keep what the client is told.

        Args:
            status: of HTTP.
            message: says what, the value, and what to do.
            param: the field of the body that it is about.
            kind: vLLM's type of error; by default that of the status.
            retry_after_s: of the header Retry-After.
        """
        super().__init__(message)
        self.status, self.param = status, param
        self.headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
        if status in _UNREAD:
            self.headers["connection"] = "close"
        self.kind = kind or _TYPES.get(status) or HTTPStatus(status).phrase.replace(" ", "")

    def response(self) -> "Response":
        """Return the whole response."""
        from starlette.responses import Response  # Triton's model raises these without the web

        return Response(
            self.body(), self.status, headers=self.headers, media_type="application/json"
        )

    def body(self) -> bytes:
        """Return the JSON body."""
        message = public(str(self))
        error = {"message": message, "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


def public(message: str) -> str:
    """Return a message without paths of this machine, and with little of what was asked."""
    told = _REPEATED.sub(_clipped, message[: 20 * _MOST])
    return _PATH.sub("...", told)[: 10 * _MOST]


def _clipped(repeated: re.Match[str]) -> str:
    text = repeated[0]
    if len(text) <= _MOST + 2 * (text[0] in _QUOTES):
        return text
    return f"{text[: _MOST - 4]}...{text[-1]}"
