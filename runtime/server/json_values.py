"""JSON as msgspec decodes it into a Struct, with errors that name the field as vLLM's do."""

import json
import re
from contextlib import suppress
from typing import Annotated, TypeVar

import msgspec

from trt_lora.runtime.server.errors import HttpError

BodyT = TypeVar("BodyT")
Number = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # that MessagePack has

_DEEPEST = 64  # lists and objects in each other
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_OTHER = bytes(set(range(256)) - set(b"[]{}"))
_PLACE, _MISSING = re.compile(r"`\$\.(\w+)"), re.compile(r"missing required field `(\w+)`")


class NoNumber:
    """`NaN` or `Infinity`, which Python writes where JSON has no word; messages tell the name."""


def decoded(raw: bytes, kind: type[BodyT], *, strict: bool = True) -> BodyT:
    """Return a body of JSON.

    Args:
        raw: the JSON.
        kind: a Struct.
        strict: False takes numbers in quotes, too.

    Raises:
        HttpError: 400; it is none, lacks a field, has one of another type, or is too deep.
    """
    try:
        raw.decode()  # msgspec does not look at fields that are unknown
        body = _body(raw, kind, strict)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        found = _PLACE.search(str(error)) or _MISSING.search(str(error))
        param = f"body.{found[1]}" if found else None
        text = f"1 validation error:\n  {error}"
        raise HttpError(400, text, param, kind="Bad Request") from error
    if _is_deeper(raw):
        raise HttpError(400, f"the body is deeper than {_DEEPEST} lists and objects")
    return body


def _body(raw: bytes, kind: type[BodyT], strict: bool) -> BodyT:
    """A body, or an error that names the field which has a number that JSON has not."""
    try:
        return msgspec.json.decode(raw, type=kind, strict=strict)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if b"NaN" in raw or b"Infinity" in raw:
            with suppress(json.JSONDecodeError):
                msgspec.convert(json.loads(raw, parse_constant=lambda _: NoNumber()), kind)
        raise


def _is_deeper(raw: bytes) -> bool:
    """Whether brackets lie deeper in each other: each turn takes the innermost ones away."""
    if raw.count(b"[") + raw.count(b"{") <= _DEEPEST:
        return False
    brackets = _STRINGS.sub(b"", raw).translate(bytes.maketrans(b"{}", b"[]"), _OTHER)
    for _ in range(_DEEPEST):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)
