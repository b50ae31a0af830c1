"""EngineClient: the engine's half of a server, as a coroutine sees it."""

import asyncio
import itertools
import socket
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from trt_lora.plugins.errors import BackendError, LoRAError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.server.engine_process import wire

_READ = 1 << 18  # bytes at a time


class EngineClient:
    """Submits requests, and brings the tokens of a step to those that wait for them.

    All methods are called in the event loop's thread.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the two ends of the socket's stream."""
        self._writer = writer
        self._calls = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # by call
        self._submitted: dict[int, Answers] = {}  # by call
        self._answers: dict[int, tuple[Answers, int]] = {}  # by number; the index among them
        self.rows = 0
        self._last_step = wire.Step([], {})
        self.dead = asyncio.get_running_loop().create_future()  # done when the engine is gone
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def open(cls, connection: socket.socket, opening: wire.Open) -> "EngineClient":
        """Let the engine's half open an engine.

        Raises:
            LoRAError: as `open_engine` and `Engine.serve`; BackendError: it has died.
        """
        client = cls(*await asyncio.open_connection(sock=connection))
        try:
            client.rows = await client._call(0, opening)
        except BaseException:
            client.abandon()
            await asyncio.wait({client._reading})
            raise
        return client

    def __len__(self) -> int:
        """How many requests have not ended."""
        return len(self._answers)

    @property
    def running(self) -> int:
        """How many requests have a row: at the last step, and no more than have not ended since."""
        return min(self._last_step.running, len(self))

    @property
    def queued(self) -> int:
        """How many have none."""
        return min(self._last_step.waiting, len(self) - self.running)

    @property
    def waiting_adapters(self) -> set[str]:
        """The adapters of requests that have no token yet, and what their blends are made of."""
        waiting = (answers for answers, _ in self._answers.values() if not answers.has_begun)
        return {adapter for answers in waiting for adapter in answers.adapters}

    def requests_of(self, adapter: str) -> tuple[int, int]:
        """Return how many requests use an adapter and have tokens, and how many have none yet."""
        found = [a.has_begun for a, _ in self._answers.values() if adapter in a.adapters]
        return sum(found), len(found) - sum(found)

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        adapter: str | None,
        blend: Mapping[str, float] | None = None,
        client: str | None = None,
        salt: str | None = None,
    ) -> "Answers":
        """Let the engine answer prompts, `sampling.n` times each; all of them, or none.

        The answers to each prompt have `max_tokens` of their own, not those of `sampling`.

        Raises:
            LoRAError: as `EngineLoop.submit`; BackendError: the engine is gone.
        """
        adapters = tuple(blend or ()) if adapter is None else (adapter,)
        call, answers = next(self._calls), Answers(self, adapters)
        self._submitted[call] = answers
        command = wire.Submit(
            call,
            [list(prompt) for prompt in prompts],
            list(max_tokens),
            _changed(sampling),
            adapter,
            dict(blend or {}),
            client,
            salt,
        )
        try:
            await self._call(call, command)
        except BaseException:
            answers.close()
            raise
        return answers

    async def ask(self, what: str, **options: Any) -> Any:
        """Return the answer of `AdapterDesk`.

        Raises:
            LoRAError: as it does; BackendError: the engine is gone.
        """
        call = next(self._calls)
        return await self._call(call, wire.Ask(call, what, options))

    def cancel(self, numbers: Sequence[int]) -> None:
        """Let requests go; they give nothing more."""
        known = [number for number in numbers if self._answers.pop(number, None)]
        if known and not self.dead.done():
            self._send(wire.Cancel(known))

    def fail_all(self, error: LoRAError) -> None:
        """End every request with an error, and every question."""
        self._fail_calls(error)
        numbers = list(self._answers)
        for number in numbers:
            self._give(number, error)
        if numbers and not self.dead.done():
            self._send(wire.Cancel(numbers))

    async def close(self, within_s: float | None = None) -> bool:
        """Let the engine's half end, and return whether it has, within so many seconds."""
        if not self.dead.done():
            self._send(wire.Close())
        done, _ = await asyncio.wait({self._reading}, timeout=within_s)
        self.abandon()
        await asyncio.wait({self._reading})
        return bool(done)

    def abandon(self) -> None:
        """Let the engine's half end, without waiting."""
        self._writer.transport.abort()

    async def _call(self, call: int, command: wire.Command) -> Any:
        if self.dead.done():
            raise _gone()
        answer = self._waiting[call] = asyncio.get_running_loop().create_future()
        self._send(command)
        try:
            return await answer
        finally:
            self._waiting.pop(call, None)

    def _send(self, command: wire.Command) -> None:
        self._writer.write(wire.framed(command))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = wire.Frames()
        try:
            while data := await reader.read(_READ):
                for event in frames.events(data):
                    self._take(event)
        except OSError:  # reset: the engine's process was killed
            pass
        finally:
            self._end()

    def _take(self, event: wire.Event) -> None:
        if isinstance(event, wire.Step):
            self._last_step = event
            for number, times in event.times.items():
                if number in self._answers:
                    answers, index = self._answers[number]
                    answers.times[index] = times
            for token in event.tokens:
                self._give(token.sequence_id, token)
            for number, error in event.failed.items():
                self._give(number, error.error())
        elif isinstance(event, wire.Accepted):
            self._accept(event)
        else:
            self._submitted.pop(event.call, None)
            waiting = self._waiting.get(event.call)
            if waiting is None or waiting.done():
                return
            if isinstance(event, wire.Failed):
                waiting.set_exception(event.error.error())
            else:
                waiting.set_result(event.value)

    def _accept(self, event: wire.Accepted) -> None:
        answers = self._submitted[event.call]
        for number in event.numbers:
            self._answers[number] = answers, len(answers.numbers)
            answers.numbers.append(number)
        if answers.is_closed:  # who asked is gone meanwhile
            self.cancel(event.numbers)

    def _give(self, number: int, event: "Token | LoRAError") -> None:
        found = self._answers.get(number)
        if found is None:
            return
        waiting, index = found
        if isinstance(event, LoRAError) or event.finish_reason is not None:
            del self._answers[number]
        waiting.put((index, event))

    def _end(self) -> None:
        """Tell everybody who waits that nothing comes any more."""
        self.dead.set_result(None)
        self._fail_calls(_gone())
        for number in list(self._answers):
            self._give(number, _gone())

    def _fail_calls(self, error: LoRAError) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)


class Answers:
    """The answers to one HTTP request, as they come; a reader that is slow finds more at a time."""

    def __init__(self, client: EngineClient, adapters: Sequence[str]) -> None:
        """Begin without requests; they use an adapter, several in a blend, or none."""
        self.numbers: list[int] = []
        self.times: dict[int, wire.RequestTimes] = {}  # so far, by answer
        self.adapters = adapters
        self.is_closed = self.has_begun = False
        self._client = client
        self._events: list[tuple[int, Token | LoRAError]] = []
        self._is_there: asyncio.Future[None] | None = None  # for who waits

    def put(self, event: "tuple[int, Token | LoRAError]") -> None:
        """Add what has come."""
        self._events.append(event)
        self.has_begun = True
        if self._is_there is not None and not self._is_there.done():
            self._is_there.set_result(None)

    async def take(self) -> "list[tuple[int, Token | LoRAError]]":
        """Wait for events, and return all that there are: an answer's index, and a token of it."""
        if not self._events:
            self._is_there = asyncio.get_running_loop().create_future()
            await self._is_there
        events, self._events = self._events, []
        return events

    async def waits_for(self) -> str:
        """Return what keeps them waiting: a row, a slot, or an adapter that is read."""
        try:
            known = [await self._client.ask("adapter", name=name) for name in self.adapters]
        except LoRAError as error:
            return str(error)
        levels = {each["level"] for each in known}
        if "disk" in levels:
            return "its adapter to be read"
        return "a slot" if "memory" in levels else "a row"

    def close(self) -> None:
        """Cancel what has not ended: the client is gone, or has its answer."""
        self.is_closed = True
        self._client.cancel(self.numbers)


def _changed(sampling: SamplingParams) -> dict[str, Any]:
    """The fields that are not at their defaults, in values that MessagePack has."""
    changed = {}
    for field in fields(sampling):
        value = getattr(sampling, field.name)
        if value not in (None, field.default) and field.name != "max_tokens":
            changed[field.name] = value
    return changed


def _gone() -> BackendError:
    return BackendError("the engine's process is gone; start the server again")
