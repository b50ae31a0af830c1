"""TokenStreams: tokens of an `EngineLoop`, whose thread is its own, for coroutines."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial

from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sequence import Sequence as Request
from trt_lora.runtime.generation.token import StepAnswers, Token
from trt_lora.runtime.serving.engine_loop import EngineLoop
from trt_lora.runtime.serving.scheduler import Scheduler

_Event = Token | BaseException | None  # None: it was cancelled


class TokenStream:
    """The answers to one prompt; it is iterated over once, and has to be closed."""

    def __init__(self, streams: "TokenStreams") -> None:
        """Begin without requests."""
        self._streams, self._is_closed = streams, False
        self.events = asyncio.Queue[_Event]()
        self._places: dict[int, int] = {}  # by request, which of the answers it is
        self.is_cancelled = False

    async def tokens(self) -> AsyncIterator[tuple[int, Token]]:
        """Yield the tokens of all answers, each with the number of its answer; end if cancelled.

        Raises:
            LoRAError: a request has failed.
        """
        left = len(self._places)
        while left and (event := await self.events.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            left -= event.finish_reason is not None
            yield self._places[event.sequence_id], event

    def accept(self, requests: Sequence[Request]) -> None:
        """Know the requests before any event of them can come; any thread may say so."""
        self._places = {request.id: place for place, request in enumerate(requests)}
        self._streams.follow(self, self._places)
        if self._is_closed:
            self.close()

    def cancel(self) -> None:
        """Let the requests go, and end whoever iterates."""
        self.is_cancelled = True
        self.close()
        self.events.put_nowait(None)

    def close(self) -> None:
        """Let requests go that have not ended."""
        self._is_closed = True
        self._streams.let_go(self._places)


class TokenStreams:
    """Submits to a loop from coroutines, and hands out what each step has given, in one call."""

    def __init__(
        self, scheduler: Scheduler, on_step: Callable[[float], None] | None = None
    ) -> None:
        """Start the engine's thread; the arguments are those of `EngineLoop`."""
        self._coroutines = asyncio.get_running_loop()
        self._streams: dict[int, TokenStream] = {}  # by request
        self.loop = EngineLoop(scheduler, self._deliver, on_step=on_step)

    async def submit(
        self,
        stream: TokenStream,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        adapter: str | None,
        salt: str | None,
    ) -> None:
        """Submit `sampling.n` requests of a prompt, whose answers a stream will have.

        Raises:
            ConfigError, BackendError, UnknownAdapterError, StateError: as `EngineLoop.submit`.
        """
        submit = partial(
            self.loop.submit,
            prompt,
            sampling,
            adapter=adapter,
            salt=salt,
            on_requests=stream.accept,
        )
        if sampling.structured_outputs is None:
            submit()
        else:  # a grammar is compiled, which takes its time
            await asyncio.to_thread(submit)

    def follow(self, stream: TokenStream, requests: Iterable[int]) -> None:
        """Give a stream what comes for requests."""
        self._streams |= dict.fromkeys(requests, stream)

    def let_go(self, requests: Iterable[int]) -> None:
        """Cancel the requests that have not ended."""
        for request in requests:
            if self._streams.pop(request, None) is not None:
                self.loop.cancel(request)

    def _deliver(self, answers: StepAnswers) -> None:
        self._coroutines.call_soon_threadsafe(self._hand_out, answers)

    def _hand_out(self, answers: StepAnswers) -> None:
        ended = [number for number, token in answers.tokens.items() if token.finish_reason]
        events: dict[int, Token | BaseException] = {**answers.tokens, **answers.failed}
        for number, event in events.items():
            if (stream := self._streams.get(number)) is not None:
                stream.events.put_nowait(event)
        for number in [*ended, *answers.failed]:
            self._streams.pop(number, None)
