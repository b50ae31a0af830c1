"""RequestRecord: what is known of a request, for the line and the spans that tell of its end."""

import hashlib
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import Scope

from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.server.errors import GONE, HttpError
from trt_lora.runtime.server.telemetry.answer_end import AnswerEnd

LONGEST = 256  # characters of an id or a name that a client gives, and of a path
_STATE, _RECORD = "state", "trt_lora_record"
_TOLD = ("id", "client", "method", "path", "status", "error", "param", "model")
_TIMES = ("queue_s", "load_s", "prefill_s", "decode_s")


@dataclass
class RequestRecord:
    """Who learns something of a request notes it here; no prompt, no answer and no key."""

    id: str
    client: str | None  # a hash of its key, or its address
    method: str
    path: str
    trace: Mapping[str, str]  # headers of the W3C's trace context
    began_at: float = field(default_factory=time.time)  # seconds since 1970
    start: float = field(default_factory=time.perf_counter)
    total_s: float = 0.0
    status: int = GONE  # until a response begins
    body_bytes: int = 0
    body_s: float = 0.0  # until it had come, from where times of answers are counted
    error: str | None = None  # the kind of a refusal or a failure
    param: str | None = None  # the field of the body that it is about
    operation: str | None = None  # of an answer: chat or text_completion
    model: str | None = None  # as the request calls it
    adapters: Sequence[str] = ()  # the one, or those that are blended
    sampling: SamplingParams | None = None
    ends: Sequence[AnswerEnd] = ()
    usage: Mapping[str, Any] = field(default_factory=dict)  # tokens of its prompts and answers

    @classmethod
    def of(cls, scope: Scope) -> "RequestRecord":
        """Begin the record of a request, where `record_of` finds it."""
        connection = HTTPConnection(scope)
        headers = connection.headers
        key = headers.get("authorization")
        host = connection.client.host if connection.client else None
        record = cls(
            headers.get("x-request-id", "")[:LONGEST] or uuid.uuid4().hex,
            hashlib.sha256(key.encode()).hexdigest()[:16] if key else host,
            scope["method"],
            scope["path"][:LONGEST],
            {name: headers[name] for name in ("traceparent", "tracestate") if name in headers},
        )
        scope.setdefault(_STATE, {})[_RECORD] = record
        return record

    @property
    def only_looks(self) -> bool:
        """Whether nothing was asked for but to see how things are, and it was told."""
        return self.method in ("GET", "HEAD", "OPTIONS") and self.status < 400

    def refused(self, error: HttpError) -> None:
        """Note why there is no answer, or no whole one."""
        self.error, self.param = error.kind, error.param

    def facts(self) -> dict[str, Any]:
        """Return what a line tells, by name; of several answers the longest times."""
        told = {name: getattr(self, name) for name in _TOLD} | {"adapter": ",".join(self.adapters)}
        if self.ends:
            told |= _of_answers(self.ends, self.usage)
        told["total_s"] = round(self.total_s, 6)
        return {name: value for name, value in told.items() if value not in (None, "")}


def _of_answers(ends: Sequence[AnswerEnd], usage: Mapping[str, Any]) -> dict[str, Any]:
    times = [end.times for end in ends if end.times is not None]
    found = {name: max(getattr(each, name) for each in times) for name in _TIMES if times}
    firsts = [end.first_s for end in ends if end.first_s is not None]
    found |= {"first_token_s": min(firsts)} if firsts else {}
    return {
        "version": max((each.version or 0 for each in times), default=0) or None,
        "reason": ",".join(dict.fromkeys(end.reason for end in ends)),
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "tokens": usage["completion_tokens"],
        **{name: round(seconds, 6) for name, seconds in found.items()},
    }


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request."""
    record: RequestRecord = scope[_STATE][_RECORD]
    return record
