"""RunningAnswer: the tokens of one HTTP request on their way to who asked."""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from trt_lora.plugins.errors import (
    AdapterError,
    BackendError,
    ChangedAdapterError,
    ConfigError,
    LoRAError,
    OutputError,
    StateError,
    UnknownAdapterError,
)
from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.server.admission import Ticket
from trt_lora.runtime.server.answers.bodies import named_field
from trt_lora.runtime.server.answers.choices import Choice, usage
from trt_lora.runtime.server.engine_process.engine_client import Answers
from trt_lora.runtime.server.errors import HttpError
from trt_lora.runtime.server.telemetry.answer_end import AnswerEnd
from trt_lora.runtime.server.telemetry.metrics import ServerMetrics
from trt_lora.runtime.server.telemetry.request_record import RequestRecord


class RunningAnswer:
    """The answers to one HTTP request on their way; it is closed however they end."""

    def __init__(
        self,
        answers: Answers,
        ticket: Ticket,
        choices: list[Choice],
        metrics: ServerMetrics,
        *,
        field: str,
        start: float,
        record: RequestRecord,
        interval: int = 1,
    ) -> None:
        """Begin without tokens.

        Args:
            answers: from the engine.
            ticket: of those that are admitted.
            choices: an answer each.
            metrics: are told of beginnings and ends.
            field: of the body, that names the adapter.
            start: when the request was whole, by the clock of `time.perf_counter`.
            record: is told of the ends, too.
            interval: the first token of an answer comes at once, others so many or more at a time.
        """
        self.choices, self._left = choices, len(choices)
        self._answers, self._ticket, self._metrics = answers, ticket, metrics
        self._held: list[list[Token]] = [[] for _ in choices]  # of each, without text so far
        self._field, self._interval, self._start = field, interval, start
        self._failed: int | None = None
        self._record = record

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return not self._left

    async def take(self, within_s: float | None = None) -> dict[int, list[Token]]:
        """Wait for tokens, and return them by choice; those without text come with the next.

        Args:
            within_s: return nothing after so many seconds.

        Raises:
            HttpError: a request has failed, or has waited too long for its first token.
        """
        found: dict[int, list[Token]] = {}
        for index, given in await self._events(within_s):
            if isinstance(given, LoRAError):
                self._failed = index
                raise http_error(given, self._field) from given
            now, held, choice = time.perf_counter(), self._held[index], self.choices[index]
            if not choice.tokens:
                self._ticket.begin()
                self._metrics.first_token(now - self._start, len(choice.prompt.ids))
            choice.add(given, now)
            choice.times = self._answers.times.get(index)
            held.append(given)
            is_last = given.finish_reason is not None
            self._left -= is_last
            is_due = len(held) >= min(self._interval, len(choice.tokens))
            if is_last or (given.text and is_due):
                found[index] = found.get(index, []) + held
                self._held[index] = []
        return found

    def close(self) -> None:
        """Cancel what has not ended."""
        if self._ticket.is_open:
            prompts = len({id(choice.prompt) for choice in self.choices})
            ends = [self._end(index, choice) for index, choice in enumerate(self.choices)]
            uses_adapter = bool(self._answers.adapters)
            self._metrics.ended(ends, len(ends) // prompts, uses_adapter=uses_adapter)
            self._record.ends, self._record.usage = ends, usage(self.choices, details=True)
        self._answers.close()
        self._ticket.close()

    async def _events(self, within_s: float | None) -> list[tuple[int, Token | LoRAError]]:
        left = self._ticket.seconds_left
        if left is None and within_s is None:
            return await self._answers.take()
        bound = min(bound for bound in (left, within_s) if bound is not None)
        try:
            async with asyncio.timeout(bound):
                return await self._answers.take()
        except TimeoutError as error:
            if left is None or left > bound:
                return []
            raise late(await self._answers.waits_for()) from error

    def _end(self, index: int, choice: Choice) -> AnswerEnd:
        reason = choice.tokens[-1].finish_reason if choice.tokens else None
        ended_at = time.perf_counter() if reason is None else choice.last_at
        times = self._answers.times.get(index)
        if times is not None and reason is None:  # they are those of the first token
            times = msgspec.structs.replace(times, decode_s=choice.last_at - choice.first_at)
        return AnswerEnd(
            reason or ("error" if index == self._failed else "abort"),
            ended_at - self._start,
            choice.first_at - self._start if choice.tokens else None,
            len(choice.prompt.ids),
            len(choice.tokens),
            choice.max_tokens,
            times,
        )


class AnswerStream(StreamingResponse):
    """A stream whose requests end with it, also where no chunk was ever asked for."""

    def __init__(self, chunks: AsyncIterator[bytes], running: RunningAnswer) -> None:
        """Take the chunks, and what they come from."""
        super().__init__(chunks, media_type="text/event-stream")
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.close()


def late(what: str) -> HttpError:
    """Return the error of a request that has waited too long for something."""
    text = f"no token came in time: the request waited for {what}"
    return HttpError(503, text, retry_after_s=1)


def http_error(error: BaseException, field: str | None = None) -> HttpError:
    """Return what a client is told of an error of the library; `field` names an adapter."""
    if isinstance(error, UnknownAdapterError):
        return HttpError(404, str(error), field)
    if isinstance(error, ConfigError):
        return HttpError(400, str(error), named_field(str(error)))
    if isinstance(error, ChangedAdapterError):
        return HttpError(409, str(error), field)
    if isinstance(error, AdapterError):
        # Of a blend it is the scale; of a model its files, which are not what they were.
        return HttpError({"lora": 400, "model": 409}.get(field or "", 500), str(error), field)
    if isinstance(error, OutputError):
        return HttpError(500, str(error))
    if isinstance(error, StateError | BackendError):
        return HttpError(503, str(error))
    return HttpError(500, "the engine has failed; its log says more")
