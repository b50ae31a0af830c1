"""Admission: how many requests wait for the engine at a time, and how long."""

import asyncio
from collections import Counter
from dataclasses import dataclass

from trt_lora.plugins.checked import check_range
from trt_lora.runtime.server.errors import HttpError

_RETRY_S = 1  # of the header Retry-After
_REASONS = ("draining", "max_num_queued_reqs", "max_num_queued_tokens", "max_client_requests")


@dataclass(frozen=True)
class AdmissionConfig:
    """Bounds of the queue; None is without one."""

    max_num_queued_reqs: int | None = None  # beside those that run; None: 8 for each row
    max_num_queued_tokens: int | None = None  # of their prompts
    max_client_requests: int | None = None  # of one API key, or address
    queue_timeout_s: float = 60.0  # until the first token

    def __post_init__(self) -> None:
        """Refuse numbers without a meaning.

        Raises:
            ConfigError: there is one.
        """
        check_range("--max-num-queued-reqs", self.max_num_queued_reqs, 0)
        check_range("--max-num-queued-tokens", self.max_num_queued_tokens, 0)
        check_range("--max-client-requests", self.max_client_requests, 1)
        check_range("--queue-timeout", self.queue_timeout_s, 0)


class Admission:
    """Refuses requests that would wait behind too many others."""

    def __init__(self, config: AdmissionConfig, rows: int) -> None:
        """Take the bounds, and how many requests the engine runs at a time."""
        self.config = config
        queued = 8 * rows if config.max_num_queued_reqs is None else config.max_num_queued_reqs
        self._most, self._kept = rows + queued, rows
        self.requests = self.tokens = 0  # of those that have not ended; that have no token yet
        self.rejections = Counter[str](dict.fromkeys(_REASONS, 0))
        self._clients = Counter[str | None]()
        self.refuses = False  # the server is ending

    def admit(self, requests: int, tokens: int, client: str | None) -> "Ticket":
        """Let requests of one body wait or run; close what is returned when they end.

        A place for each row is kept for clients that have nothing under way: whoever fills the
        queue keeps nobody else out.

        Raises:
            HttpError: 503 with a Retry-After, or 429 where the client itself has too many.
        """
        config = self.config
        self.check_open()
        kept = 0 if client in self._clients else self._kept
        if self.requests + requests > self._most + kept and self.requests:
            text = f"{self.requests} requests wait or run, {self._most} may"
            raise self._refusal("max_num_queued_reqs", text)
        most = config.max_num_queued_tokens
        if most is not None and self.tokens + tokens > most and self.tokens:
            text = f"prompts of {self.tokens} tokens wait, {most} may"
            raise self._refusal("max_num_queued_tokens", text)
        most = config.max_client_requests
        if most is not None and self._clients[client] + requests > most:
            text = f"this client has {self._clients[client]} requests under way, {most} may be"
            raise self._refusal("max_client_requests", text, 429)
        return Ticket(self, requests, tokens, client)

    def check_open(self) -> None:
        """Take nothing more where the server ends.

        Raises:
            HttpError: 503 with a Retry-After.
        """
        if self.refuses:
            raise self._refusal("draining", "this server is ending; ask another one")

    def count(self, requests: int, tokens: int, client: str | None) -> None:
        """Add to what waits or runs, or take from it."""
        self.requests += requests
        self.tokens += tokens
        self._clients[client] += requests
        if not self._clients[client]:
            del self._clients[client]

    def _refusal(self, reason: str, text: str, status: int = 503) -> HttpError:
        self.rejections[reason] += 1
        return HttpError(status, f"{text}; try again later", retry_after_s=_RETRY_S)


class Ticket:
    """What the requests of one body take of the queue, until they end."""

    def __init__(
        self, admission: Admission, requests: int, tokens: int, client: str | None
    ) -> None:
        """Count them."""
        self._admission, self._requests, self._client = admission, requests, client
        self._tokens, self.is_open = tokens, True
        self._late_at = asyncio.get_running_loop().time() + admission.config.queue_timeout_s
        admission.count(requests, tokens, client)

    @property
    def seconds_left(self) -> float | None:
        """How long the first token may still take; None once it is there."""
        if not self._tokens:
            return None
        return max(self._late_at - asyncio.get_running_loop().time(), 0.0)

    def begin(self) -> None:
        """Note that tokens come: prompts wait no more."""
        self._admission.count(0, -self._tokens, self._client)
        self._tokens = 0

    def close(self) -> None:
        """Note that all have ended; once is enough."""
        if self.is_open:
            self._admission.count(-self._requests, -self._tokens, self._client)
            self.is_open, self._tokens = False, 0
